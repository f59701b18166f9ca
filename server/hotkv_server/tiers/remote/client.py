"""The protocol of a tier's connection to its server.

Always true: a method settles its blocks, or raises StoreError; then the client must be closed.
Codes are filled in as blocks are settled; a block that was not settled keeps its code. Only `read`
writes slots. Epochs are read after the blocks: see the `epochs` of each kind of server.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hotkv_server.tiers.protocol import Codes, Epochs, Seals, Shown

# ------------------------------------------------------------------------------------------- Errors

# What can go wrong with a server, in words that people can act on. No message has a secret in it.

MAX_WORDS = 200


class StoreError(Exception):
    """The call has failed, and its connection must not be used any more. The message goes on after
    the server's name, such as "valkey at ...": it names neither."""


class MissingError(Exception):
    """A library is not installed; the message says what to do."""


class LostError(StoreError):
    """The connection has ended, or what came over it is no reply that was asked for."""


class LateError(StoreError):
    """The time limit has passed."""


class UnusableError(StoreError):
    """The server answers, but cannot be used as it is, or not by this user."""


def quoted(text: bytes) -> str:
    """What a server said, in printable characters, shortened."""
    said = text.decode("utf-8", "replace")[:MAX_WORDS]
    return repr("".join(char if char.isprintable() else "?" for char in said))


# --------------------------------------------------------------------------------------- The client


class Client(Protocol):
    """A connection that a tier calls, one call at a time. `until_s`: time limit, of
    time.monotonic. All raise StoreError."""

    def is_fresh(self) -> bool:
        """False if the connection has ended meanwhile."""

    def probe(
        self, keys: Sequence[bytes], expected: Epochs, codes: Codes, until_s: float
    ) -> Epochs:
        """Looks which keys are there. Returns the epochs that differ from those expected; if any
        does, no block is settled."""

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Epochs,
        codes: Codes,
        until_s: float,
    ) -> Epochs:
        """Fills slots, and deletes values that are damaged. Returns as `probe`."""

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        seals: Seals,
        until_s: float,
    ) -> None:
        """Stores slots under keys that are not there yet. `depths`: as in `Blocks`."""

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Deletes values."""

    def epochs(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Returns the epochs of key spaces. Those that are not there begin."""

    def raise_epoch(self, fingerprint: str, floor: int, until_s: float) -> int:
        """Ends the epoch of a key space. Returns the next one, which is above `floor`, or NO_EPOCH
        if a full server has no room for one: then nothing passes until `epochs` begins one. Raises
        LostError if there was none and there is no room: nobody could tell that from before."""

    def close(self) -> None:
        """Gives the connection back."""


Connect = Callable[[float], Client]
"""Makes a client that can be used, until a time of time.monotonic. Raises StoreError."""
