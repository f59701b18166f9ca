"""The versions of vLLM that hotkv works with. `make check` compares the connector's use of vLLM
with these versions' sources.

With any other version hotkv is off and the engine runs without it: hooks whose meaning has changed
could serve wrong KV, and an engine that does not start is worse than an engine without a cache.
`hotkv.allow_untested_vllm` turns hotkv on nevertheless.
"""

import re

from vllm import __version__

VERSION = str(__version__)
FIRST, LAST = (0, 32), (0, 33)
"""Release lines, both included; a line's patch releases belong to it."""

RANGE = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


def why_off(allow_untested: bool) -> str:
    """Returns why hotkv is off with this version of vLLM; empty if the version is supported or
    `allow_untested`."""
    release = re.match(r"(\d+)\.(\d+)", VERSION)
    if allow_untested or (
        release is not None and FIRST <= (int(release[1]), int(release[2])) <= LAST
    ):
        return ""
    return (
        f"it is tested with vLLM {RANGE}, and this is {VERSION}; set "
        "hotkv.allow_untested_vllm to use it nevertheless"
    )


def why_not_imported(error: ImportError) -> str:
    """Returns the message for an engine whose vLLM lacks a name that the connector imports."""
    return f"hotkv works with vLLM {RANGE}, and this is {VERSION}: {error}"
