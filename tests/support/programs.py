"""Finds programs of the Linux distribution that some tests run: a browser, Prometheus, Compose,
systemd-nspawn.

`make programs` installs them. A test whose program is missing is skipped with a message.
"""

import shutil
from pathlib import Path

import pytest

PACKAGES = {
    "chromium": "chromium",
    "docker-compose": "docker-compose",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "systemd-nspawn": "systemd-container",
}
"""The Debian package that contains each program."""


def program(name: str) -> Path:
    """Returns the program's path. Skips the test if the program is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: `make programs` installs Debian's package {PACKAGES[name]}")
    return Path(found)
