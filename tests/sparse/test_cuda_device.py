"""Tests `CupyDevice` without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

COMPILES = """
import ctypes, os, pathlib, queue, signal, sys, tempfile, threading
from types import ModuleType, SimpleNamespace
from contextlib import nullcontext

from tools import check_kernels

source = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1])) / "kernel.cu"
source.write_text('extern "C" __global__ void one(int* out) { out[threadIdx.x] = 1; }')
compiler = check_kernels.find_compiler()
c_signal = ctypes.CDLL(None).signal
c_signal.argtypes, c_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p

class RawModule:
    def __init__(self, code, options, name_expressions):
        pass

    def get_function(self, name):
        if isinstance(compiler, check_kernels.Nvrtc):
            compiler.compile(source, 90, ())
        for number in (signal.SIGINT, signal.SIGTERM):
            c_signal(number, c_signal(number, None))

cupy = ModuleType("cupy")
cupy.RawModule = RawModule
cupy.cuda = SimpleNamespace(Device=nullcontext, ExternalStream=lambda stream, number: None)
sys.modules["cupy"] = cupy

from hotkv_sparse.cuda.device import CupyDevice

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: os._exit(7))
CupyDevice().compile()
threading.Timer(1, os.kill, (os.getpid(), int(sys.argv[2]))).start()
queue.Queue().get()
"""
"""Compiles the kernels, waits for a lock in the main thread as an idle engine does, and gets a
signal. The fake CuPy compiles by NVRTC, if there is one, and then sets handlers anew with C's
`signal`, as NVRTC 12 does."""


@pytest.mark.parametrize("number", [2, 15])
def test_a_signal_wakes_a_process_that_has_compiled(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", COMPILES, str(tmp_path), str(number)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 7
