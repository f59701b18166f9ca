"""Decides whether hotkv works with the installed version of vLLM. It works with the tested
versions, and with every version whose sources still have the API that hotkv uses (`compat.uses`).

With any other version hotkv is off and the engine runs without it: hooks whose meaning has changed
could serve wrong KV, and an engine that does not start is worse than an engine without a cache.
`hotkv.allow_untested_vllm` turns hotkv on nevertheless.
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

    With an untested version the door is on if `allow_untested` is set, or if vLLM still has the
    whole API that the door uses; the reason is then logged.
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
    """Returns the reason to log if vLLM lacks a name that a door (one of hotkv's two connectors)
    imports."""
    return f"hotkv works with vLLM {uses.span(door)}, and this is {VERSION}: {error}"


@functools.cache
def say_once(text: str) -> None:
    """Logs a warning, once per process."""
    logger.warning(text)


@functools.cache
def _answer(door: str, version: str) -> uses.Answer:
    """Returns whether a door (one of hotkv's two connectors) works with a version of vLLM. Computed
    once per process."""
    return uses.answer(door, version)
