"""Advice how to install an extra, such as `otel`: its packages are on PyPI, hotkv itself is not."""

import re
import shlex


def packages(extra: str) -> list[str]:
    """Packages with version bounds; empty if hotkv is not installed, or has no such extra."""
    from importlib import metadata

    try:
        needed = metadata.requires("hotkv") or []
    except metadata.PackageNotFoundError:
        return []
    is_of_extra = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    parts = (one.partition(";") for one in needed)
    return [name.strip() for name, _, marker in parts if is_of_extra.search(marker)]


def advice(extra: str) -> str:
    names = packages(extra)
    if not names:
        return f"pip install '.[{extra}]' in a clone of hotkv"
    return "pip install " + " ".join(map(shlex.quote, names))
