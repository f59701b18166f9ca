"""The protocol of a tier's connection to its store (`Client`), and its errors.

Always true: a method sets the code (a value of `Read` or `Write`, the result) of each block whose
result it knows; other blocks keep their codes. If a method raises StoreError, the client must be
closed. Only `read` writes to slots (places in the arena). In a read, a client asks for the
generations (numbers that flushes raise) after it has read the blocks. This order guarantees that no
flushed
block is served: `valkey.generations` has the proof.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hotkv_server.tiers.protocol import Codes, Generations, Shown

# ------------------------------------------------------------------------------------------- Errors

# Errors of a store's server. Their messages tell an operator how to fix the cause, and contain no
# secrets.

MAX_WORDS = 200
"""Most characters of a server's own text that a message quotes."""


class StoreError(Exception):
    """A call or a connect has failed. The connection must be closed.

    The tier then counts as down: its calls fail at once, until a connect succeeds. There are three
    exceptions, after which the tier stays up: a LostError of a call, a LateError at the deadline of
    a call that moves blocks, and a RefusedError.

    The error's message continues a sentence that begins with the store's name, such as "valkey at
    host:port".
    """


class MissingError(Exception):
    """A library is not installed. The message says how to install it."""


class LostError(StoreError):
    """The connection has ended, or the store has sent something other than a valid reply, such as
    text in place of a number. If a call raises this error, the tier stays up, and the next call
    connects again."""


class LateError(StoreError):
    """The store has not answered within the time limit. The tier stays up if this limit was the
    deadline of a call that moves blocks."""


class UnusableError(StoreError):
    """The store answers, but hotkv can't use it: hotkv's user lacks a right, or the store is in an
    unusable state."""


class RefusedError(StoreError):
    """The store forbids hotkv's user to write, so only writes fail."""


def quoted(text: bytes) -> str:
    """Returns a text of the store as a quoted string, for a message. It has at most MAX_WORDS
    characters, all printable."""
    said = text.decode("utf-8", "replace")[:MAX_WORDS]
    return repr("".join(char if char.isprintable() else "?" for char in said))


# --------------------------------------------------------------------------------------- The client


class Client(Protocol):
    """A tier's connection to its store. One call at a time.

    All methods may block until their time limit, and may raise StoreError. `Workers` logs any other
    exception as a defect. The arguments of several methods:

    `keys`: keys of blocks; they may contain any bytes.
    `slots`: for each key, the memory of the block's slot (place in the arena).
    `expected`: the generations that the keys contain (numbers that each flush raises), by
        fingerprint.
        NO_GENERATION never matches: it counts as different from every generation of the store, and
        also from a missing generation.
    `codes`: gets the result of each block, a value of `Read` or `Write`, uint8 [number of keys].
    `fingerprint`, `fingerprints`: names of key spaces.
    `until_s`: the time limit, a time of time.monotonic.
    """

    @property
    def moved_s(self) -> float:
        """The time at which bytes were last sent or received over the connection, a time of
        time.monotonic. It shows the caller whether a long call is slow or hangs. 0 if the client
        does not know the time, infinity while the client does not wait for the store. Callable from
        any thread."""

    def is_fresh(self) -> bool:
        """Returns False if the connection has ended since its last use."""

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        """Asks the store which keys exist, and sets their codes to FOUND, ABSENT or FAILED. Returns
        the store's generations (numbers that each flush raises) that differ from `expected`, by the
        key space's fingerprint. If a generation differs, sets no code."""

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Generations,
        codes: Codes,
        until_s: float,
    ) -> Generations:
        """Reads the values of the keys into the slots (places in the arena), and writes the result
        code of each key to `codes`. Deletes damaged values. Returns the store's generations
        (numbers that each flush raises) that differ from `expected`, by the key space's
        fingerprint. If an generation differs, the caller must not use the blocks."""

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        until_s: float,
    ) -> None:
        """Stores the bytes of each slot (place in the arena) under its key. A key that exists keeps
        its value. Writes the result code of each key to `codes`.

        `depths`: for each block, the number of blocks before it in its sequence.
        """

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Deletes the values of the keys, which are keys of blocks. Only `hotkv-server tiers check`
        also passes the key of a generation (number that each flush raises),
        `hotkv/1/FINGERPRINT/generation`."""

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Returns the key spaces' generations (numbers that each flush raises). Begins a generation
        (`tiers.protocol.begun`) for each key space that has no generation in the store. Leaves out
        a key space whose generation in the store is not a number."""

    def raise_generation(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        """Flushes a key space (a model in a configuration) in the store, which deletes all its
        blocks there. For this, raises the key space's generation (a number that each flush raises):
        ends the old generation, and begins and returns a new one, which is greater than the old
        generation and `floor`.

        `floor`: the highest generation of the key space that the caller knows.
        `is_retry`: True if the last call for the same flushes has failed.

        If the store is full and can't take the new generation, this method removes the old
        generation and returns NO_GENERATION. Then reads find no blocks until `generations` begins a
        new generation. If there was no old generation to remove, raises LostError, because other
        nodes would not notice the flush.
        """

    def close(self) -> None:
        """Closes the connection."""


Connect = Callable[[float], Client]
"""Connects to the store and returns the client. Blocks at most until the given time of
time.monotonic. Raises StoreError."""
