"""Tests `bench/gpu/vllm/thin.py` on made-up files with GPU code."""

import struct

import pytest

from bench.gpu.vllm.thin import CONTAINER, ENTRY, MACHINE_CODE, MAGIC, PTX, thin

HOST = b"host code, not touched"


def entry(kind: int, architecture: int, code: bytes, header_bytes: int = 64) -> bytes:
    header = ENTRY.pack(kind, 0x101, header_bytes, len(code), architecture)
    return header.ljust(header_bytes, b"h") + code


def container(*entries: bytes) -> bytes:
    return CONTAINER.pack(MAGIC, 1, CONTAINER.size, sum(map(len, entries))) + b"".join(entries)


def shared_object(fatbin: bytes) -> bytes:
    """An ELF file with the sections `.nv_fatbin`, `.text` and the names."""
    names = b"\0.nv_fatbin\0.text\0.shstrtab\0"
    parts = {b".nv_fatbin": fatbin, b".text": HOST, b".shstrtab": names}
    rows, body = [bytes(64)], b""
    for name, content in parts.items():
        row = struct.pack("<IIQQQQ", names.index(name), 1, 0, 0, 64 + len(body), len(content))
        rows.append(row.ljust(64, b"\0"))
        body += content
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(rows), len(rows) - 1)
    return head.ljust(64, b"\0") + body + b"".join(rows)


def test_code_of_other_architectures_becomes_zeros() -> None:
    fatbin = container(
        entry(MACHINE_CODE, 80, b"code of 80"),
        entry(MACHINE_CODE, 90, b"code of 90", header_bytes=112),
        entry(PTX, 90, b"PTX of 90"),
    )
    padding = bytes(-len(fatbin) % 8) + bytes(8)
    file = shared_object(fatbin + padding + container(entry(MACHINE_CODE, 90, b"and more")))
    out, num_kept = thin(file, 90)
    expected = file.replace(b"code of 80", bytes(10)).replace(b"PTX of 90", bytes(9))
    assert out == expected and num_kept == len(b"code of 90and more") and HOST in out


@pytest.mark.parametrize(
    ("fatbin", "says"),
    [
        (b"no container here", "no container"),
        (container(entry(7, 90, b"code")), "no entry"),
        (container(entry(MACHINE_CODE, 90, b"code"))[:-2], "exceeds its section"),
        (container(entry(MACHINE_CODE, 80, b"code")), "no code for sm_90"),
    ],
)
def test_what_it_cannot_read_is_refused(fatbin: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        thin(shared_object(fatbin), 90)
    with pytest.raises(ValueError, match="not a 64-bit"):
        thin(b"text", 90)
