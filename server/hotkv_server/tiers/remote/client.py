"""A tier's connection to its store (`Client`), and its errors.

Always true: a method sets the codes that it knows and leaves the others. After a StoreError the
client must be closed. Only `read` writes to slots, and it asks for generations after the blocks,
so no flushed block is served (proof: `valkey.generation_keys`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hotkv_server.tiers.protocol import Codes, Generations, Shown

# ------------------------------------------------------------------------------------------- Errors

# Messages say how to fix the cause, and have no secrets.

MAX_WORDS = 200
"""Most characters of a server's text in a message."""


class StoreError(Exception):
    """A call or connect has failed; close the connection. The message follows the store's name.

    The tier is then down until a connect succeeds. Three errors leave it up: a LostError of a
    call (not of a connect), a LateError at the deadline of a call with blocks, and a
    RefusedError.
    """


class MissingError(Exception):
    """A library is not installed; the message says how to install it."""


class LostError(StoreError):
    """The connection has ended, or a reply is invalid."""


class LateError(StoreError):
    """The store has not answered in time."""


class UnusableError(StoreError):
    """The store answers but can't be used: a right is missing, or its state is bad."""


class RefusedError(StoreError):
    """The store forbids writes only."""


def quoted(text: bytes) -> str:
    """Printable, at most MAX_WORDS characters."""
    said = text.decode("utf-8", "replace")[:MAX_WORDS]
    return repr("".join(char if char.isprintable() else "?" for char in said))


# --------------------------------------------------------------------------------------- The client


class Client(Protocol):
    """One call at a time. Methods may block until their time limit and raise StoreError; `Workers`
    logs other exceptions as defects.

    `slots`: memory of each key's slot.
    `expected`: the keys' generations, by fingerprint. NO_GENERATION never matches, not even a
        missing one.
    `codes`: uint8 [keys], gets `Read` or `Write` values.
    `until_s`: time.monotonic.
    """

    @property
    def moved_s(self) -> float:
        """When bytes last moved, which tells a slow call from a hung one. 0 if unknown, infinity
        while the client does not wait for the store. Any thread."""

    def is_fresh(self) -> bool:
        """False if the connection has ended since its last use."""

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        """Sets FOUND, ABSENT or FAILED, and returns {}; or sets nothing, and returns the store's
        generations that differ from `expected`."""

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Generations,
        codes: Codes,
        until_s: float,
    ) -> Generations:
        """Reads into the slots and deletes damaged values. Returns the store's generations that
        differ from `expected`: if any, the blocks must not be used."""

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        until_s: float,
    ) -> None:
        """A key that exists keeps its value."""

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Keys of blocks; `hotkv-server tiers check` also passes
        `hotkv/1/FINGERPRINT/generation`."""

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Begins missing generations. Omits those that are no number."""

    def raise_generation(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        """Begins and returns a generation above both the present one and `floor`, the highest that
        the caller knows.

        If the store is full, removes the present generation instead and returns NO_GENERATION:
        reads then find nothing until `generations` begins a new one. If there is none to remove,
        raises LostError, because other nodes would not notice the flush. `is_retry`: the last
        call for the same flushes failed.
        """

    def close(self) -> None: ...


Connect = Callable[[float], Client]
"""Blocks until the given time.monotonic at most. Raises StoreError."""
