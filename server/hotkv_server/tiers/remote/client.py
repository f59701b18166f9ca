"""The protocol of a tier's connection to its store (`Client`), and its errors.

Always true: a method sets the code (`Read` or `Write`) of each block whose result it knows; other
blocks keep their former code. If it raises StoreError, the client must be closed. Only `read`
writes to slots. A client asks for epochs (numbers that flushes raise) after it has read the blocks,
so that a flush holds: `valkey.epochs` has the proof.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hotkv_server.tiers.protocol import Codes, Epochs, Seals, Shown

# ------------------------------------------------------------------------------------------- Errors

# Errors of a server, as messages from which people see how to fix the cause. Messages have no
# secrets.

MAX_WORDS = 200
"""Most characters of a server's text in a message."""


class StoreError(Exception):
    """A call or a connect failed, and the connection must be closed.

    The tier is then down, so its calls fail at once, until a connect succeeds. Exceptions: after a
    LostError of a call, and after a LateError at the deadline of a call that moves blocks, the tier
    stays up. The message continues a sentence that begins with the store's name, as in "valkey at
    ...".
    """


class MissingError(Exception):
    """A library is not installed. The message says how to install it."""


class LostError(StoreError):
    """The connection has ended, or its data is not a valid reply (such as an epoch that is not a
    number). If a call meets this error, the tier stays up, and the next call connects again."""


class LateError(StoreError):
    """The time limit has passed. The tier stays up if the limit was the deadline of a call that
    moves blocks."""


class UnusableError(StoreError):
    """The store answers, but this user can't use it, or can't use it in its present state."""


def quoted(text: bytes) -> str:
    """Returns a server's text as a quoted string of at most MAX_WORDS printable characters."""
    said = text.decode("utf-8", "replace")[:MAX_WORDS]
    return repr("".join(char if char.isprintable() else "?" for char in said))


# --------------------------------------------------------------------------------------- The client


class Client(Protocol):
    """A tier's connection to its store. One call at a time.

    Keys may contain any bytes. `until_s` is the time limit of a method, a time of time.monotonic.
    All methods may block until then. Methods may raise StoreError; `Workers` logs any other
    exception as a defect.
    """

    def is_fresh(self) -> bool:
        """Returns False if the connection has ended since its last use."""

    def probe(
        self, keys: Sequence[bytes], expected: Epochs, codes: Codes, until_s: float
    ) -> Epochs:
        """Checks which keys exist, and sets their codes to FOUND, ABSENT or FAILED. Returns the
        store's epochs (numbers that flushes raise) that differ from `expected`; if there are any,
        no code is set."""

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Epochs,
        codes: Codes,
        until_s: float,
    ) -> Epochs:
        """Reads the keys' values into the slots and sets the codes. Deletes damaged values. Returns
        the store's epochs (numbers that flushes raise) that differ from `expected`."""

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        seals: Seals,
        until_s: float,
    ) -> None:
        """Stores the bytes of each slot under its key; a key that exists keeps its value. Sets the
        codes, and the seals (check values) of STORED blocks. `depths`: for each block, the number
        of blocks before it in its sequence."""

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Deletes the values of the keys."""

    def epochs(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Returns the epochs of key spaces (numbers that flushes raise). Begins an epoch for each
        key space that has none."""

    def raise_epoch(self, fingerprint: str, floor: int, until_s: float) -> int:
        """Ends the epoch of a key space (the number that each flush raises). Returns the next
        epoch, which is above `floor`.

        If the server is full and can't store the next epoch, this method removes the old epoch and
        returns NO_EPOCH. Then reads find no blocks until `epochs` begins a new epoch. Raises
        LostError if the server is full and there was no epoch to remove, because other nodes would
        not notice the flush.
        """

    def close(self) -> None:
        """Closes the connection."""


Connect = Callable[[float], Client]
"""Connects and returns the client. Blocks at most until the given time of time.monotonic. Raises
StoreError."""
