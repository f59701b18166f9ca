"""Loads modules of kernels, which numba compiles, by name at their first use: numba takes a
second to load, and clients can do without. These call `load`; the server and the sparse library
`require`."""

import functools
import importlib
import importlib.util
import os
import sys
from types import ModuleType


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
    numba's cache on disk."""
    if not available():
        return None
    kernels = importlib.import_module(module_name)
    _answer_scans()
    return kernels


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
