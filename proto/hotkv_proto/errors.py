"""The base class of hotkv's errors, and the enum of their reasons.

A refusal always has a reason and a sentence that names the problem and the fix. If a field is
wrong, the sentence begins with the field's path. Three outcomes are return values, never errors: a
miss, an answer that is not ready yet, and a lease that pins fewer blocks than requested.
"""

import enum
from typing import Final


class Reason(enum.IntEnum):
    """The reason why a call was refused; numbered as `hotkv.v1.ErrorReason`."""

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
"""For each reason: whether the same call, unchanged, may succeed later. A test checks that every
`Reason` has an entry. docs/wire.md names a remedy for each reason."""


class HotKVError(Exception):
    """A call was refused and has changed no state. Exception: if a subclass of this error was
    raised, the server may have executed the call.

    reason: the reason for the refusal, for programs.
    message: sentence that names the problem and the fix, for people.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    @property
    def retryable(self) -> bool:
        """Returns True if the same call, unchanged, may succeed later."""
        return RETRYABLE[self.reason]

    @property
    def reason_name(self) -> str:
        """Returns the reason as messages and `hotkv --json` show it."""
        return self.reason.name

    def __str__(self) -> str:
        return f"{self.reason_name}: {self.message}"


def invalid(message: str, reason: Reason = Reason.INVALID_FIELD) -> HotKVError:
    """Returns the error that refuses a call because of a wrong field. `reason`: given if a more
    exact reason than INVALID_FIELD exists."""
    return HotKVError(reason, message)


def check_most(most: int, count: int, what: str, advice: str = "") -> None:
    """Raises TOO_LARGE if `count` exceeds `most`.

    what: start of the error message, with {} in place of the count.
    advice: end of the error message.
    """
    if count > most:
        raise HotKVError(
            Reason.TOO_LARGE, f"{what.format(count)}; at most {most} are accepted{advice}"
        )


class NoAnswerError(HotKVError):
    """The server could not be reached, or did not answer in time. The server may have executed the
    call. `reason` is INTERNAL, because no reason of the protocol fits; `reason_name` is
    NO_ANSWER."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INTERNAL, message)

    @property
    def retryable(self) -> bool:
        return True

    @property
    def reason_name(self) -> str:
        return "NO_ANSWER"


class SessionLostError(HotKVError):
    """There is no connection to the server, or the connection broke before the server answered. The
    server may have executed the call.

    If a load fails with this error, the server can no longer access the engine's memory for this
    load.
    """

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNKNOWN_SESSION, message)
