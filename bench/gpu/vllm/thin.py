"""Overwrites GPU code that one architecture does not run with zeros, so that a shared object packs
well: `python thin.py IN OUT ARCHITECTURE`, such as 90 for sm_90 and sm_90a.

Always true: every offset, the host code, and the kept GPU code stay byte for byte. A file that
can't be read to its end raises ValueError and writes nothing.

PTX, which the driver compiles for newer architectures, goes too: vLLM has no code for sm_90 of some
kernels for quantised weights, and those fail. Standard library only.
"""

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
CONTAINER = struct.Struct("<IHHQ")
"""Magic, version, bytes of this header, bytes of all entries."""
ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, version, bytes of this header, bytes of the code, architecture."""
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """Code of one architecture: where it lies in the file."""

    kind: int
    architecture: int
    begin: int
    end: int


def sections(file: bytes | bytearray, name: bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) of each section of that name in a 64-bit little-endian ELF file."""
    if file[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", file, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", file, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", file, table + at * size) for at in range(count)]
    names = rows[of_names][4] if count else 0
    for name_at, _, _, _, begin, num_bytes in rows:
        found_at = names + name_at
        if file[found_at : file.index(0, found_at)] == name:
            yield begin, begin + num_bytes


def containers(file: bytes | bytearray, begin: int, end: int) -> Iterator[list[Entry]]:
    """Raises ValueError at bytes that are neither a container nor padding."""
    section = begin
    while begin + CONTAINER.size <= end:
        magic, _, header_bytes, num_bytes = CONTAINER.unpack_from(file, begin)
        if magic == MAGIC and header_bytes >= CONTAINER.size:
            first, begin = begin + header_bytes, begin + header_bytes + num_bytes
            if begin > end:
                raise ValueError(f"the container at {first - header_bytes:#x} exceeds its section")
            yield list(_entries(file, first, begin))
            begin += (section - begin) % ALIGNMENT
        elif not any(file[begin : begin + ALIGNMENT]):
            begin += ALIGNMENT
        else:
            raise ValueError(f"no container at {begin:#x}")


def _entries(file: bytes | bytearray, begin: int, end: int) -> Iterator[Entry]:
    while begin + ENTRY.size <= end:
        kind, _, header_bytes, num_bytes, architecture = ENTRY.unpack_from(file, begin)
        code, after = begin + header_bytes, begin + header_bytes + num_bytes
        if kind not in (PTX, MACHINE_CODE) or header_bytes < ENTRY.size or after > end:
            raise ValueError(f"no entry at {begin:#x}")
        yield Entry(kind, architecture, code, after)
        begin = after


def thin(file: bytes, architecture: int) -> tuple[bytes, int]:
    """The thinned file, and the bytes of GPU code in it."""
    out, num_kept = bytearray(file), 0
    for begin, end in sections(file, SECTION):
        for entries in containers(file, begin, end):
            for one in entries:
                num_bytes = one.end - one.begin
                if (one.kind, one.architecture) == (MACHINE_CODE, architecture):
                    num_kept += num_bytes
                else:
                    out[one.begin : one.end] = bytes(num_bytes)
    if not num_kept:
        raise ValueError(f"no code for sm_{architecture}")
    return bytes(out), num_kept


def main() -> int:
    source, target, architecture = sys.argv[1:]
    file = Path(source).read_bytes()
    out, num_kept = thin(file, int(architecture))
    Path(target).write_bytes(out)
    print(f"{Path(source).name}: {num_kept >> 10} KiB of GPU code kept of {len(file) >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
