"""Loads compiled kernels.

Modules named `kernels` import numba. Other modules import them by name at the first use, because
numba takes a second to load, clients can work without it, and vLLM's scan of its CPU kernels must
run before numba is loaded. Clients call `load`, and compute in numpy if it returns None. The server
and the sparse library call `require`.
"""

import functools
import importlib
import importlib.util
import os
from types import ModuleType


@functools.cache
def available() -> bool:
    """Returns whether kernels (functions that numba compiles) can be used: numba is installed and
    HOTKV_DISABLE_NUMBA is not set."""
    return (
        not os.environ.get("HOTKV_DISABLE_NUMBA") and importlib.util.find_spec("numba") is not None
    )


def why_unavailable() -> str:
    """Returns why kernels (functions that numba compiles) can't be used, and the fix."""
    if os.environ.get("HOTKV_DISABLE_NUMBA"):
        return "HOTKV_DISABLE_NUMBA is set: server and sparse decode need kernels, unset it"
    return "numba is not installed: pip install numba"


@functools.cache
def load(module_name: str) -> ModuleType | None:
    """Loads a module of kernels (functions that numba compiles), compiled now or from numba's disk
    cache; None if kernels can't be used. Takes seconds the first time."""
    return importlib.import_module(module_name) if available() else None


@functools.cache
def require(module_name: str) -> ModuleType:
    """Loads a module of kernels (functions that numba compiles) that the caller can't work without.
    Takes seconds the first time. Raises ImportError if kernels can't be used."""
    kernels = load(module_name)
    if kernels is None:
        raise ImportError(why_unavailable())
    return kernels
