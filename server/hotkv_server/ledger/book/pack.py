"""Converts accounts and forecast into the bytes of the ledger's file, and back.

Always true: an incomplete, damaged or foreign file is refused as a whole. Columns go by name, so
tiers and reasons may come and go between two servers.

    8 bytes  magic and format version
    4 bytes  CRC-32 of all bytes after it
    4 bytes  length of the JSON text
             the JSON text, which describes the arrays
    arrays   for each account the row numbers of its nonzero cells (int32), then these cells
             (float64); the same for the forecast; then the forecast's seen keys (uint64)
"""

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.ledger.book.accounts import HIT, NUM_CELLS, Account, Accounts, Buckets, Columns
from hotkv_server.ledger.book.forecast import NAMES, Forecast

MAGIC = b"HOTKVLG1"
HEADER = struct.Struct("<8sII")
MAX_BYTES = 64 << 20


class PackError(ValueError):
    """The bytes are not a ledger's file; the message says why."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An earlier server's ledger.

    names: columns of `rows`.
    rows: least recently used first.
    seen_share: share of all keys in the sample of `seen`.
    speeds: tokens/s by key space.
    """

    names: tuple[str, ...]
    began_minute: int
    num_folded: int
    rows: list[tuple[Account, Buckets]]
    forecast: Buckets
    seen: Keys
    seen_share: float
    speeds: dict[str, float]

    @property
    def tiers(self) -> list[str]:
        return [name.removeprefix(HIT) for name in self.names if name.startswith(HIT)]


def pack(accounts: Accounts, forecast: Forecast, seen: Keys, seen_share: float) -> list[bytes]:
    """Pieces of the file, for `seal`. They are copies: the ledger may change after this call.

    seen, seen_share: read at one time, perhaps earlier than this call.
    """
    tables = [_cells(row) for _, row in accounts.rows()]
    outlook = _cells(forecast.sums)
    text = {
        "columns": accounts.columns.names,
        "began_minute": accounts.began_minute,
        "num_folded": accounts.num_folded,
        "accounts": [
            [one.tenant, one.model, one.key_space, one.engine_id, row.minute, len(at)]
            for (one, row), (at, _) in zip(accounts.rows(), tables, strict=True)
        ],
        "forecast": [forecast.sums.minute, len(outlook[0])],
        "forecast_columns": NAMES,
        "seen": len(seen),
        "seen_share": seen_share,
        "speeds": accounts.speeds,
    }
    arrays = (array for table in [*tables, outlook] for array in table)
    return [json.dumps(text).encode(), *(array.tobytes() for array in arrays), seen.tobytes()]


def seal(pieces: Iterable[bytes]) -> bytes:
    """The file's content from the pieces of `pack`. Any thread."""
    text, *arrays = pieces
    body = struct.pack("<I", len(text)) + text + b"".join(arrays)
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def unpack(content: bytes) -> Kept:
    """Raises PackError."""
    if len(content) < HEADER.size:
        raise PackError(f"it has {len(content)} bytes")
    magic, crc, length = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise PackError(f"it begins with {magic!r}; this version reads {MAGIC!r}")
    if zlib.crc32(content[12:]) != crc:
        raise PackError("its checksum does not hold: it is torn or damaged")
    try:
        text = json.loads(content[HEADER.size : HEADER.size + length])
        reader = _Reader(content, HEADER.size + length)
        names = tuple(map(str, text["columns"]))
        rows = []
        for *words, minute, count in text["accounts"]:
            tenant, model, key_space, engine_id = map(str, words)
            row = reader.buckets(int(count), len(names), int(minute))
            rows.append((Account(tenant, model, key_space, engine_id), row))
        minute, count = map(int, text["forecast"])
        sums = reader.buckets(count, len(text["forecast_columns"]), minute)
        if tuple(text["forecast_columns"]) != NAMES:
            sums = Buckets(len(NAMES), minute)
        seen, share = reader.keys(int(text["seen"])), float(text["seen_share"])
        if not 0 < share <= 1:
            raise ValueError(f"seen_share is {share}")
        began, folded = int(text["began_minute"]), int(text["num_folded"])
        speeds = {str(name): float(speed) for name, speed in text.get("speeds", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise PackError(f"it is damaged: {type(error).__name__} {error}") from error
    return Kept(names, began, folded, rows, sums, seen, share, speeds)


def put_back(kept: Kept, accounts: Accounts, forecast: Forecast) -> None:
    """Continues an earlier ledger in a new `accounts` and `forecast`."""
    accounts.began_minute, accounts.num_folded = kept.began_minute, kept.num_folded
    accounts.speeds = dict(kept.speeds)
    columns = accounts.columns
    known = [at for at, name in enumerate(kept.names) if name in columns.names]
    places = [columns.at(kept.names[at]) for at in known]
    for account, old in kept.rows:
        row = Buckets(len(columns), old.minute)
        row.cells[:, places] = old.cells[:, known]
        accounts.put_back(account, row)
    forecast.sums = kept.forecast
    forecast.put_back(kept.seen, kept.seen_share)


def columns_for(tiers: Iterable[str], kept: Kept | None) -> Columns:
    """Includes the tiers of an earlier ledger."""
    return Columns([*tiers, *(kept.tiers if kept is not None else ())])


def _cells(row: Buckets) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Indices of the rows that are not all 0, int32 [n], and their values, float64 [n, columns]."""
    at = np.flatnonzero(row.cells.any(axis=1)).astype("<i4")
    cells: NDArray[np.float64] = row.cells[at].astype("<f8")
    return at, cells


class _Reader:
    """Reads arrays one after the other. Raises ValueError if too few bytes are left."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content = content
        self._at = at

    def buckets(self, count: int, num_columns: int, minute: int) -> Buckets:
        """The file has only the `count` rows that are not all 0. `minute`: the newest."""
        row = Buckets(num_columns, minute)
        at = np.frombuffer(self._take(4 * count), "<i4")
        if len(at) and not (at.min() >= 0 and at.max() < NUM_CELLS):
            raise ValueError("a cell has a number that is none")
        values = np.frombuffer(self._take(8 * count * num_columns), "<f8")
        row.cells[at] = values.reshape(count, num_columns)
        return row

    def keys(self, count: int) -> Keys:
        return np.frombuffer(self._take(8 * count), "<u8").astype(np.uint64)

    def _take(self, num_bytes: int) -> bytes:
        part = self._content[self._at : self._at + num_bytes]
        if num_bytes < 0 or len(part) < num_bytes:
            raise ValueError("it is too short")
        self._at += num_bytes
        return part
