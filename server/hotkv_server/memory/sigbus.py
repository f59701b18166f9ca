"""Keeps the server alive when a client cuts short a file that the server has mapped.

Touching a page beyond the end of a file raises SIGBUS, whose default ends the process, and no check
beforehand helps: the file may be cut in the middle of a copy. So memory of clients is guarded: at
the first such touch the whole mapping is replaced by empty memory of the server's own, its owner is
told, and the copy goes on over zeros that nobody will keep. A SIGBUS anywhere else ends the process
as ever.

The handler is Python. A thread that copies holds neither the GIL nor any lock at that moment, so it
may wait for the GIL there. Known fault: a SIGBUS that somebody sends with kill(2) may meet a thread
that is just taking the GIL, and then the server hangs until its watchdog ends it.
"""

import ctypes
import os
import signal
from collections.abc import Callable

_SA_SIGINFO = 4
_CODE_OFFSET, _ADDRESS_OFFSET = 8, 16
"""Of si_code and si_addr in siginfo_t, on 64-bit Linux."""


class _Action(ctypes.Structure):
    """struct sigaction of glibc and musl on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p
_guarded: dict[int, tuple[int, Callable[[], None]]] = {}
"""By address: length and what to do."""


def guard(address: int, num_bytes: int, on_fault: Callable[[], None]) -> None:
    """Calls `on_fault` from now on for a touch beyond the file's end, in the thread that touched;
    it must put memory in the mapping's place."""
    _guarded[address] = num_bytes, on_fault


def release(address: int) -> None:
    """Ends the guard of a mapping, before it is unmapped."""
    _guarded.pop(address, None)


def _handle(number: int, info: int, context: int) -> None:
    at = ctypes.c_size_t.from_address(info + _ADDRESS_OFFSET).value
    is_fault = ctypes.c_int.from_address(info + _CODE_OFFSET).value > 0
    for address, (num_bytes, on_fault) in list(_guarded.items()):
        if is_fault and address <= at < address + num_bytes:
            on_fault()
            return
    _libc.signal(signal.SIGBUS, None)  # Python's own would refuse in this thread.
    if not is_fault:
        os.kill(os.getpid(), signal.SIGBUS)


_on_bus_error = _Handler(_handle)


def install() -> None:
    """Installs the handler, once, at start. Raises OSError."""
    action = _Action(
        ctypes.cast(_on_bus_error, ctypes.c_void_p), (ctypes.c_byte * 128)(), _SA_SIGINFO, None
    )
    if _libc.sigaction(signal.SIGBUS, ctypes.byref(action), None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
