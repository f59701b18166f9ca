"""Translates error codes of a Valkey server into messages that say how to make it usable.

Always true: messages have no secrets. Replies to AUTH and HELLO are never quoted, because servers
repeat the arguments of unknown commands.
"""

from hotkv_server.tiers.remote.client import UnusableError

FULL_CODES = ("OOM", "MISCONF", "NOREPLICAS")
"""Codes of errors with which a server refuses writes while reads go on."""
INCOMPLETE = "INCOMPLETE"
"""Code of hotkv, not of Valkey: the settings name a cluster, and it answers with one of
INCOMPLETE_CODES, or a hash slot has no server."""
INCOMPLETE_CODES = ("MOVED", "ASK", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN")
STANDALONE = "STANDALONE"
"""Code of hotkv, not of Valkey: the settings name a cluster, and the server is not in a cluster."""
_CLUSTER = "is a cluster: set cluster = true"
_UNUSABLE = {
    "LOADING": "still loads its data",
    "BUSY": "runs a script and answers nothing else",
    "MASTERDOWN": "is a replica that has lost its primary: give the primary's address",
    "READONLY": "is a read-only replica: give the primary's address",
    "SENTINEL": "is a sentinel: give the address of a server",
    "NOAUTH": "asks for a password: set password_file, and user if it is not the default user",
    "WRONGPASS": "rejects user and password: check user and password_file",
    "NOPERM": "forbids this user what hotkv needs: allow it ~hotkv/1/* +get +set +exists +unlink "
    "+incrby +hello +client|setname, of a cluster +cluster|slots +asking +wait, else +select +info",
    "DENIED": "is in protected mode, so only clients of its own machine may speak to it",
    INCOMPLETE: "is a cluster of which a server is away, and no replica has taken its place yet",
    STANDALONE: "is no cluster: set cluster = false",
    **dict.fromkeys(INCOMPLETE_CODES, _CLUSTER),
}


def unusable(code: str) -> UnusableError | None:
    """Returns the error for a reply with this error code, if the code means that the whole server
    is unusable; else None."""
    words = _UNUSABLE.get(code)
    return UnusableError(words) if words else None


class Errors:
    """Collects the error codes of a pipeline's replies. Keeps the first error that makes the whole
    server unusable."""

    def __init__(self) -> None:
        self._first: UnusableError | None = None

    def add(self, code: str) -> None:
        """Adds the error code of a reply."""
        self._first = self._first or unusable(code)

    def check(self) -> None:
        """Raises UnusableError if a code meant that the whole server is unusable. Call this method
        after the last reply was read."""
        if self._first is not None:
            raise self._first
