"""Programs of the Linux distribution (`make programs`) that some tests need."""

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
"""Debian's package of each program."""


def program(name: str) -> Path:
    """Skips the test if it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: `make programs` installs Debian's package {PACKAGES[name]}")
    return Path(found)
