"""Loads modules of kernels, which numba compiles, by name at their first use: numba takes a
second to load, and clients can do without. These call `load`; the server and the sparse library
`require`."""

import functools
import importlib
import importlib.util
import logging
import os
import sys
import tempfile
from types import ModuleType

_log = logging.getLogger(__name__)
NO_DIRECTORY = "no directory for compiled kernels can be written: name one in NUMBA_CACHE_DIR"
_NUMBAS_WORDS = "cannot cache function"
"""Of its RuntimeError if there is no such directory."""
_temporary: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""


@functools.cache
def available() -> bool:
    """Numba is installed and HOTKV_DISABLE_NUMBA is not set."""
    return (
        not os.environ.get("HOTKV_DISABLE_NUMBA") and importlib.util.find_spec("numba") is not None
    )


def why_unavailable() -> str:
    """Reason and fix."""
    if os.environ.get("HOTKV_DISABLE_NUMBA"):
        return "HOTKV_DISABLE_NUMBA is set: server and sparse decode need kernels, unset it"
    return "numba is not installed: pip install numba"


@functools.cache
def load(module_name: str) -> ModuleType | None:
    """None if kernels can't be used. Takes seconds at first: kernels are compiled, or read from
    numba's cache on disk. If this user can write no such cache, each process compiles its own."""
    if not available():
        return None
    try:
        kernels = importlib.import_module(module_name)
    except RuntimeError as error:
        if _NUMBAS_WORDS not in str(error) or is_temporary():
            raise
        _keep_for_this_process()
        kernels = importlib.import_module(module_name)
    _answer_scans()
    return kernels


def is_temporary() -> bool:
    """Compiled kernels are lost when this process ends."""
    return bool(_temporary)


def _keep_for_this_process() -> None:
    """Of this user alone: numba runs what it finds in its cache."""
    from numba.core import config

    _temporary.append(tempfile.TemporaryDirectory(prefix="hotkv-kernels-"))
    config.CACHE_DIR = _temporary[0].name
    _log.warning("%s; until then each start compiles them anew", NO_DIRECTORY)


def _answer_scans() -> None:
    """Gives llvmlite's library object an empty `__dict__`. It returns a function for any name,
    also for this one, so code that inspects all modules raises, as vLLM does when a CPU engine
    starts (`vllm.triton_utils.dispatcher`)."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    functions = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(functions, dict):
        functions["__dict__"] = {}


@functools.cache
def require(module_name: str) -> ModuleType:
    """Takes seconds the first time. Raises ImportError if kernels can't be used."""
    kernels = load(module_name)
    if kernels is None:
        raise ImportError(why_unavailable())
    return kernels
