"""Names the packages of an extra, such as `otel`, for advice how to install them. They are on
PyPI; hotkv itself is not."""

import re
import shlex
from importlib import metadata


def packages(extra: str) -> list[str]:
    """With version bounds; empty if hotkv is not installed as a package, or has no such extra."""
    try:
        needed = metadata.requires("hotkv") or []
    except metadata.PackageNotFoundError:
        return []
    is_of_extra = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    parts = (one.partition(";") for one in needed)
    return [name.strip() for name, _, marker in parts if is_of_extra.search(marker)]


def advice(extra: str) -> str:
    """The command that installs an extra."""
    names = packages(extra)
    if not names:
        return f"pip install '.[{extra}]' in a clone of hotkv"
    return "pip install " + " ".join(map(shlex.quote, names))
