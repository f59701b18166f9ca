"""Decides whether hotkv works with the installed version of vLLM. hotkv works with the tested
versions, and with every version whose sources still have the API that hotkv uses (`compat.uses`).

With any other version hotkv is off, and the engine runs without it. The alternatives would be
worse: with hotkv on, a callback whose meaning has changed could serve wrong KV; and if the engine
did not start, its users would have no engine instead of no cache. `hotkv.allow_untested_vllm` turns
hotkv on nevertheless.

A *door* is one of hotkv's two connectors: OWN is `HotKVConnector`, OFFLOADING is
`HotKVOffloadingConnector`.
"""

import functools
import logging

from vllm import __version__

from hotkv_vllm.compat import uses
from hotkv_vllm.compat.uses import OFFLOADING, OWN

__all__ = ["OFFLOADING", "OWN", "VERSION", "why_not_imported", "why_off"]

VERSION = str(__version__)

logger = logging.getLogger("vllm.hotkv")


def why_off(door: str, allow_untested: bool) -> str:
    """Returns why a door (one of hotkv's two connectors) is off with this version of vLLM; empty if
    the door is on.

    If an untested version still has the whole API that the door uses, the door is on, and a warning
    is logged once.

    door: OWN or OFFLOADING.
    allow_untested: True turns the door on with every version.
    """
    if allow_untested:
        return ""
    answer = _answer(door, VERSION)
    if not answer.is_on:
        return f"{answer}; set hotkv.allow_untested_vllm to use it nevertheless"
    if answer.changed is not None:
        say_once(f"hotkv is on: {answer}")
    return ""


def why_not_imported(error: ImportError, door: str = OWN) -> str:
    """Returns the message for an import that failed because vLLM lacks a name.

    error: the failed import.
    door: the connector (OWN or OFFLOADING) whose module was imported.
    """
    return f"hotkv works with vLLM {uses.span(door)}, and this is {VERSION}: {error}"


@functools.cache
def say_once(text: str) -> None:
    """Logs a warning. The same text is logged only once per process."""
    logger.warning(text)


@functools.cache
def _answer(door: str, version: str) -> uses.Answer:
    """Returns whether a door (one of hotkv's two connectors) works with a version of vLLM, and why.
    Computed once per process."""
    return uses.answer(door, version)
