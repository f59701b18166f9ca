"""The arguments that kernels get, without a GPU."""

import importlib.util
import re
import sys

import numpy as np
import pytest

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.cuda.device import FOLDER, SOURCES, CupyDevice, address_of


class Tensor:
    """As torch's, of a type that the array interface may not know."""

    shape = (1,)
    is_cuda = True

    def data_ptr(self) -> int:
        return 0x7F0000001000


class CupyArray:
    shape = (1,)
    __cuda_array_interface__ = {"data": (0x7F0000002000, False)}  # noqa: RUF012


def test_addresses_of_arrays() -> None:
    assert [address_of(value) for value in (Tensor(), CupyArray(), 4096, None)] == [
        0x7F0000001000,
        0x7F0000002000,
        4096,
        0,
    ]
    with pytest.raises(HotKVError, match="ndarray is no device memory") as caught:
        address_of(np.zeros(1))
    assert caught.value.reason is Reason.INVALID_FIELD


def test_every_kernel_of_a_source_is_named() -> None:
    assert {path.name for path in FOLDER.glob("*.cu")} == set(SOURCES)
    for source, kernels in SOURCES.items():
        text = (FOLDER / source).read_text()
        plain = set(
            re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(', text)
        )
        instances = {
            f"score_tokens<{bits}, {groups}>"
            for bits, groups in re.findall(r"^INSTANCE\((\d), (\d)\)", text, re.MULTILINE)
        }
        assert plain | instances == set(kernels)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_says_what_to_install() -> None:
    assert "cupy" not in sys.modules
    with pytest.raises(ImportError, match=re.escape("hotkv[cuda12]")):
        CupyDevice()
