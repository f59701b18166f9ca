"""Programs of the distribution that some tests run: a browser, Prometheus, Compose, containers of
systemd.

`make programs` installs them; tests of a missing program skip with a message.
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
"""Debian's package of each program, by the program's name."""


def program(name: str) -> Path:
    """Returns the program's path; skips the test if it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: `make programs` installs Debian's package {PACKAGES[name]}")
    return Path(found)
