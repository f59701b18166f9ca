"""hotkv's errors and their reasons.

A refusal's sentence names the problem and the fix, and begins with the field's path if a field
is wrong. A miss, an answer that is not ready yet, and a lease with fewer blocks are values,
never errors.
"""

import enum
from typing import Final


class Reason(enum.IntEnum):
    """Why a call was refused; numbered as `hotkv.v1.ErrorReason`."""

    INVALID_FIELD = 1
    INVALID_HASH = 2
    INVALID_LAYOUT = 3
    TOO_LARGE = 4
    UNKNOWN_SESSION = 5
    UNKNOWN_LEASE = 6
    UNKNOWN_KEY_SPACE = 7
    UNKNOWN_HANDLE = 9
    FOREIGN_LEASE = 10
    NOT_ALLOWED = 11
    DUPLICATE_ID = 12
    NO_MEMORY_REGISTERED = 13
    VERSION_MISMATCH = 14
    OVERLOADED = 15
    DRAINING = 16
    INTERNAL = 19
    UNAUTHENTICATED = 20
    NO_ROOM_FOR_RESIDENCY = 21
    RESIDENCY_TOO_LARGE = 22
    UNKNOWN_RESIDENCY = 23


RETRYABLE: Final[dict[Reason, bool]] = {
    Reason.INVALID_FIELD: False,
    Reason.INVALID_HASH: False,
    Reason.INVALID_LAYOUT: False,
    Reason.TOO_LARGE: False,
    Reason.UNKNOWN_SESSION: False,
    Reason.UNKNOWN_LEASE: False,
    Reason.UNKNOWN_KEY_SPACE: False,
    Reason.UNKNOWN_HANDLE: False,
    Reason.FOREIGN_LEASE: False,
    Reason.NOT_ALLOWED: False,
    Reason.DUPLICATE_ID: False,
    Reason.NO_MEMORY_REGISTERED: False,
    Reason.VERSION_MISMATCH: False,
    Reason.OVERLOADED: True,
    Reason.DRAINING: True,
    Reason.INTERNAL: False,
    Reason.UNAUTHENTICATED: False,
    Reason.NO_ROOM_FOR_RESIDENCY: True,
    Reason.RESIDENCY_TOO_LARGE: False,
    Reason.UNKNOWN_RESIDENCY: False,
}
"""Whether the same call may succeed later. docs/wire.md has a remedy for each reason."""


class HotKVError(Exception):
    """A call was refused and has changed nothing. With a subclass it may have been executed."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    @property
    def retryable(self) -> bool:
        return RETRYABLE[self.reason]

    @property
    def reason_name(self) -> str:
        """The reason as messages and `hotkv --json` show it."""
        return self.reason.name

    def __str__(self) -> str:
        return f"{self.reason_name}: {self.message}"


def invalid(message: str, reason: Reason = Reason.INVALID_FIELD) -> HotKVError:
    return HotKVError(reason, message)


def check_most(most: int, count: int, what: str, advice: str = "") -> None:
    """Raises TOO_LARGE.

    what: begins the message, with {} for the count; `advice` ends it.
    """
    if count > most:
        raise HotKVError(
            Reason.TOO_LARGE, f"{what.format(count)}; at most {most} are accepted{advice}"
        )


class NoAnswerError(HotKVError):
    """Not reached, or no answer in time. The protocol has no reason that fits: `reason` is
    INTERNAL."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INTERNAL, message)

    @property
    def retryable(self) -> bool:
        return True

    @property
    def reason_name(self) -> str:
        return "NO_ANSWER"


class SessionLostError(HotKVError):
    """No connection, or it broke before the answer. The server can no longer access the engine's
    memory for a load that fails so."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNKNOWN_SESSION, message)
