"""What can go wrong with a Valkey server, in words that people can act on.

Always true: a message has no secret in it. What the server says about AUTH or HELLO is never
quoted, because servers repeat the arguments of commands that they do not know.
"""

MAX_WORDS = 200


class StoreError(Exception):
    """The call has failed, and its connection must not be used any more. The message goes on after
    "valkey at ...": it names neither."""


class LostError(StoreError):
    """The connection has ended, or what came over it is no reply that was asked for."""


class LateError(StoreError):
    """The time limit has passed."""


class UnusableError(StoreError):
    """The server answers, but cannot be used as it is, or not by this user."""


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


def quoted(text: bytes) -> str:
    """What a server said, in printable characters, shortened."""
    said = text.decode("utf-8", "replace")[:MAX_WORDS]
    return repr("".join(char if char.isprintable() else "?" for char in said))
