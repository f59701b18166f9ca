"""What a Valkey server says when it can't be used, in words that people can act on.

Always true: a message has no secret in it. What the server says about AUTH or HELLO is never
quoted, because servers repeat the arguments of commands that they do not know.
"""

from hotkv_server.tiers.remote.errors import UnusableError

FULL_CODES = ("OOM", "MISCONF", "NOREPLICAS")
"""Codes of errors with which a server takes no more writes while reads go on."""
_CLUSTER = "is a cluster: set cluster = true, which needs the extra hotkv[cluster]"
_INCOMPLETE = "is a cluster of which a server is away, and no replica has taken its place yet"
_FORBIDDEN = "forbids this user what hotkv needs: allow it ~hotkv/1/* {} +hello +client|setname"
_OF_CLUSTERS = dict.fromkeys(("MOVED", "ASK", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN"), _INCOMPLETE)
_OF_CLUSTERS["NOPERM"] = _FORBIDDEN.format("+get +set +exists +unlink +incrby +ping +cluster|slots")
_UNUSABLE = {
    "LOADING": "still loads its data",
    "BUSY": "runs a script and answers nothing else",
    "MASTERDOWN": "is a replica that has lost its primary: give the primary's address",
    "READONLY": "is a read-only replica: give the primary's address",
    "SENTINEL": "is a sentinel: give the address of a server",
    "NOAUTH": "asks for a password: set password_file, and user if it is not the default user",
    "WRONGPASS": "rejects user and password: check user and password_file",
    "NOPERM": _FORBIDDEN.format("+get +set +exists +unlink +incrby +select +info"),
    "DENIED": "is in protected mode, so only clients of its own machine may speak to it",
    "MOVED": _CLUSTER,
    "ASK": _CLUSTER,
    "CLUSTERDOWN": _CLUSTER,
    "CROSSSLOT": _CLUSTER,
    "TRYAGAIN": _CLUSTER,
}


def unusable(code: str, *, in_cluster: bool = False) -> UnusableError | None:
    """The error for a reply with this code, if it speaks about the whole server; else None.
    `in_cluster`: the client speaks to clusters."""
    words = (in_cluster and _OF_CLUSTERS.get(code)) or _UNUSABLE.get(code)
    return UnusableError(words) if words else None


class Errors:
    """Errors of a pipeline's commands: the first that speaks about the whole server."""

    def __init__(self, *, in_cluster: bool = False) -> None:
        self._in_cluster = in_cluster
        self._first: UnusableError | None = None

    def add(self, code: str) -> None:
        """Takes a reply's code into account."""
        self._first = self._first or unusable(code, in_cluster=self._in_cluster)

    def check(self) -> None:
        """Raises that error, if there is one. Call it after the last reply."""
        if self._first is not None:
            raise self._first
