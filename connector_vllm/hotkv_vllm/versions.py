"""Decides whether hotkv works with the installed vLLM: with tested versions, and with those that
still have the API that hotkv uses (`compat.uses`).

With any other, hotkv is off and the engine runs: a callback whose meaning has changed could
serve wrong KV. `hotkv.allow_untested_vllm` overrides this.
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
    """Why a door is off with this vLLM; empty if it is on. Warns once about an untested version
    that is on.

    door: OWN or OFFLOADING.
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
    """Message for an import that failed because vLLM lacks a name."""
    return f"hotkv works with vLLM {uses.span(door)}, and this is {VERSION}: {error}"


@functools.cache
def say_once(text: str) -> None:
    """Once per process and text."""
    logger.warning(text)


@functools.cache
def _answer(door: str, version: str) -> uses.Answer:
    return uses.answer(door, version)
