"""What a Valkey server says when it can't be used, in words that people can act on.

Always true: a message has no secret in it. What the server says about AUTH or HELLO is never
quoted, because servers repeat the arguments of commands that they do not know.
"""

from hotkv_server.tiers.remote.client import UnusableError

FULL_CODES = ("OOM", "MISCONF", "NOREPLICAS")
"""Codes of errors with which a server takes no more writes while reads go on."""
INCOMPLETE = "INCOMPLETE"
"""Our own code for a cluster that says one of INCOMPLETE_CODES, where a cluster is expected."""
INCOMPLETE_CODES = ("MOVED", "ASK", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN")
STANDALONE = "STANDALONE"
"""Our own code for a single server where a cluster is expected."""
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
    "+incrby +hello +client|setname, of a cluster +cluster|slots +asking, else +select +info",
    "DENIED": "is in protected mode, so only clients of its own machine may speak to it",
    INCOMPLETE: "is a cluster of which a server is away, and no replica has taken its place yet",
    STANDALONE: "is no cluster: set cluster = false",
    **dict.fromkeys(INCOMPLETE_CODES, _CLUSTER),
}


def unusable(code: str) -> UnusableError | None:
    """Returns the error for a reply with this code, if it speaks about the whole server; else
    None."""
    words = _UNUSABLE.get(code)
    return UnusableError(words) if words else None


class Errors:
    """Errors of a pipeline's commands: the first that speaks about the whole server."""

    def __init__(self) -> None:
        self._first: UnusableError | None = None

    def add(self, code: str) -> None:
        """Takes a reply's code into account."""
        self._first = self._first or unusable(code)

    def check(self) -> None:
        """Raises that error, if there is one. Call it after the last reply."""
        if self._first is not None:
            raise self._first
