"""Loads modules of kernels: functions that numba compiles.

A module of kernels is named `kernels` and imports numba. Other modules import it by name at its
first use, because numba takes a second to load, and clients can work without it. A client calls
`load`, and computes in numpy if `load` returns None. The server and the sparse library call
`require`.
"""

import functools
import importlib
import importlib.util
import os
import sys
from types import ModuleType


@functools.cache
def available() -> bool:
    """Returns whether kernels can be used: numba is installed and HOTKV_DISABLE_NUMBA is not
    set."""
    return (
        not os.environ.get("HOTKV_DISABLE_NUMBA") and importlib.util.find_spec("numba") is not None
    )


def why_unavailable() -> str:
    """Returns the reason why kernels can't be used, and the fix."""
    if os.environ.get("HOTKV_DISABLE_NUMBA"):
        return "HOTKV_DISABLE_NUMBA is set: server and sparse decode need kernels, unset it"
    return "numba is not installed: pip install numba"


@functools.cache
def load(module_name: str) -> ModuleType | None:
    """Loads a module of kernels. Returns None if kernels can't be used.

    The first call takes seconds: kernels are compiled, or read from numba's cache on disk.
    """
    if not available():
        return None
    kernels = importlib.import_module(module_name)
    _answer_scans()
    return kernels


def _answer_scans() -> None:
    """Gives llvmlite's library object, which numba has loaded, an empty `__dict__`.

    This object returns a function for any name that is asked of it, also for `__dict__`, which
    should be a dict. So code that inspects the attributes of all modules raises. vLLM does that
    when a CPU engine starts (`vllm.triton_utils.dispatcher`), so without this fix no engine could
    start in a process that has loaded numba.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    functions = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(functions, dict):
        functions["__dict__"] = {}


@functools.cache
def require(module_name: str) -> ModuleType:
    """Loads a module of kernels without which the caller can't work. Takes seconds the first time.
    Raises ImportError if kernels can't be used."""
    kernels = load(module_name)
    if kernels is None:
        raise ImportError(why_unavailable())
    return kernels
