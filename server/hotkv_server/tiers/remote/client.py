"""The protocol of a tier's connection to its store.

Always true: a method sets the codes of its blocks or raises StoreError; then the client must be
closed. Codes are set block by block; an unsettled block keeps its code. Only `read` writes to
slots. Epochs are read after the blocks: `valkey.epochs` has the proof.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hotkv_server.tiers.protocol import Codes, Epochs, Seals, Shown

# ------------------------------------------------------------------------------------------- Errors

# Errors of a server, as messages that people can act on. Messages have no secrets.

MAX_WORDS = 200


class StoreError(Exception):
    """The call has failed, and its connection must not be used any more. The tier is down until a
    connect succeeds. The message continues a sentence that begins with the store's name, as in
    "valkey at ..."."""


class MissingError(Exception):
    """A library is not installed; the message says what to do."""


class LostError(StoreError):
    """The connection has ended, or its data is not a valid reply (such as an epoch that is not a
    number). The tier stays up; the next call connects again."""


class LateError(StoreError):
    """The time limit has passed. The tier stays up if it was the deadline of a call for blocks."""


class UnusableError(StoreError):
    """The store answers, but is unusable in this state or for this user."""


def quoted(text: bytes) -> str:
    """Returns text of a server in printable characters, shortened."""
    said = text.decode("utf-8", "replace")[:MAX_WORDS]
    return repr("".join(char if char.isprintable() else "?" for char in said))


# --------------------------------------------------------------------------------------- The client


class Client(Protocol):
    """A tier's connection, for one call at a time.

    Keys may contain any bytes. `until_s`: time limit, of time.monotonic. All methods may raise
    StoreError and no other exception; RemoteTier logs others as defects.
    """

    def is_fresh(self) -> bool:
        """Returns False if the connection has ended since its last use."""

    def probe(
        self, keys: Sequence[bytes], expected: Epochs, codes: Codes, until_s: float
    ) -> Epochs:
        """Checks which keys exist. Returns the epochs that differ from `expected`; if there are
        any, no code is set."""

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Epochs,
        codes: Codes,
        until_s: float,
    ) -> Epochs:
        """Fills slots and deletes damaged values. Returns the epochs that differ, as `probe`
        does."""

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        seals: Seals,
        until_s: float,
    ) -> None:
        """Stores slots under keys that don't exist yet. `depths`: as in `Blocks`."""

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Deletes values."""

    def epochs(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Returns the epochs of key spaces. Begins an epoch for each that has none."""

    def raise_epoch(self, fingerprint: str, floor: int, until_s: float) -> int:
        """Ends the epoch of a key space. Returns the next epoch, which is above `floor`.

        If a full server has no room for it, the epoch is removed and NO_EPOCH returned: blocks
        don't pass until `epochs` begins a new epoch. Raises LostError if the server is full and
        there was no epoch to remove, because other nodes would not notice the flush.
        """

    def close(self) -> None:
        """Closes the connection."""


Connect = Callable[[float], Client]
"""Returns a connected client, until a time of time.monotonic. Raises StoreError."""
