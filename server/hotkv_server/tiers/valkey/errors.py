"""What a Valkey server says when it can't be used, in words that people can act on.

Always true: a message has no secret in it. What the server says about AUTH or HELLO is never
quoted, because servers repeat the arguments of commands that they do not know.
"""

from hotkv_server.tiers.remote.errors import UnusableError

FULL_CODES = ("OOM", "MISCONF", "NOREPLICAS")
"""Codes of errors with which a server takes no more writes while reads go on."""
_CLUSTER = (
    "is a cluster, which this client does not speak (that needs glide, which comes later): give a "
    "server of its own"
)
_UNUSABLE = {
    "LOADING": "still loads its data",
    "BUSY": "runs a script and answers nothing else",
    "MASTERDOWN": "is a replica that has lost its primary: give the primary's address",
    "READONLY": "is a read-only replica: give the primary's address",
    "SENTINEL": "is a sentinel: give the address of a server",
    "NOAUTH": "asks for a password: set password_file, and user if it is not the default user",
    "WRONGPASS": "rejects user and password: check user and password_file",
    "NOPERM": (
        "forbids this user what hotkv needs: allow it ~hotkv/1/* +get +set +exists +unlink +incr "
        "+select +hello +client|setname"
    ),
    "DENIED": "is in protected mode, so only clients of its own machine may speak to it",
    "MOVED": _CLUSTER,
    "ASK": _CLUSTER,
    "CLUSTERDOWN": _CLUSTER,
    "CROSSSLOT": _CLUSTER,
    "TRYAGAIN": _CLUSTER,
}


def unusable(code: str) -> UnusableError | None:
    """The error for a reply with this code, if it speaks about the whole server; else None."""
    words = _UNUSABLE.get(code)
    return UnusableError(words) if words else None
