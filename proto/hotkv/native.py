"""Whether compiled kernels can be used.

Modules named `kernels` import numba at their top, so they are imported through `load`, on first use
and never at import: numba takes a second to load, clients may do without it, and vLLM's CPU kernel
scan must run before it. Every kernel has a numpy reference.
"""

import functools
import importlib
import importlib.util
import os
from types import ModuleType


@functools.cache
def available() -> bool:
    """True if numba is installed and HOTKV_DISABLE_NUMBA is not set."""
    return (
        not os.environ.get("HOTKV_DISABLE_NUMBA") and importlib.util.find_spec("numba") is not None
    )


@functools.cache
def load(module_name: str) -> ModuleType | None:
    """The kernel module, compiled or read from numba's disk cache; None if kernels can't be
    used. Takes seconds the first time."""
    return importlib.import_module(module_name) if available() else None
