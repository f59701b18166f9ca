"""What a tier asks of a connection to its server.

Always true: a method settles its blocks, or raises StoreError, and then the client must be closed.
Codes are filled in as blocks are settled; a block that was not settled keeps the code that it had.
A slot is written only within `read`. The epochs are read after the blocks: see the `epochs` of each
kind of server.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hotkv_server.tiers.protocol import Codes, Epochs, Seals, Shown


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
        """The epochs of key spaces. Those that are not there begin."""

    def raise_epoch(self, fingerprint: str, floor: int, until_s: float) -> int:
        """Ends the epoch of a key space. Returns the next one, which is above `floor`, or NO_EPOCH
        if a full server has no room for one: then nothing passes until `epochs` begins one. Raises
        LostError if there was none and there is no room: nobody could tell that from before."""

    def close(self) -> None:
        """Gives the connection back."""


Connect = Callable[[float], Client]
"""Makes a client that can be used, until a time of time.monotonic. Raises StoreError."""
