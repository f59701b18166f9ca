"""The packages that an extra of hotkv needs, for advice: hotkv itself is on no package index, these
packages are."""

import re
import shlex
from importlib import metadata


def packages(extra: str) -> list[str]:
    """Returns the packages of an extra with their versions. Empty if hotkv was not installed, or
    has no such extra."""
    try:
        needed = metadata.requires("hotkv") or []
    except metadata.PackageNotFoundError:
        return []
    is_of_extra = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    parts = (one.partition(";") for one in needed)
    return [name.strip() for name, _, marker in parts if is_of_extra.search(marker)]


def advice(extra: str) -> str:
    """Returns the command that installs what an extra needs."""
    names = packages(extra)
    if not names:
        return f"pip install '.[{extra}]' in a clone of hotkv"
    return "pip install " + " ".join(map(shlex.quote, names))
