"""Translates error codes of a Valkey or Redis server into messages that say how to make the server
usable. The code of an error reply is its first word.

Always true: messages contain no secrets. They never quote replies to AUTH and HELLO, because a
server that does not know such a command repeats its arguments (a password) in the reply.
"""

from hotkv_server.tiers.remote.client import RefusedError, StoreError, UnusableError

FULL_CODES = ("OOM", "MISCONF", "NOREPLICAS")
"""Codes with which a server refuses writes, but still executes reads."""
NO_WRITE_CODES = (*FULL_CODES, "NOPERM")
"""Codes that a write gets although hotkv's user may read."""
INCOMPLETE = "INCOMPLETE"
"""An error code of hotkv, not of Valkey. It means that a cluster can't serve a key: a server
answers with one of INCOMPLETE_CODES, or no server has the hash slot of the key."""
INCOMPLETE_CODES = ("MOVED", "ASK", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN")
"""Codes with which only servers of a cluster answer. If the settings name a single server, such an
answer means that the server belongs to a cluster."""
STANDALONE = "STANDALONE"
"""A code of hotkv, not of Valkey: the settings name a cluster, but the server belongs to none."""
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


def unusable(code: str, *, is_write: bool = False) -> StoreError | None:
    """Returns the error to raise if `code` means that the whole server is unusable. Returns None if
    it means only that one command has failed. `is_write`: True if the code answers a write; if the
    user lacks only the right to write, returns a RefusedError."""
    if is_write and code == "NOPERM":
        return RefusedError(f"refuses writes, so it only serves reads: it {_UNUSABLE[code]}")
    words = _UNUSABLE.get(code)
    return UnusableError(words) if words else None


class Errors:
    """Collects the error codes in the replies to a batch of commands. Keeps the first code which
    means that the whole server is unusable."""

    def __init__(self) -> None:
        self._first = ""

    def add(self, code: str) -> None:
        """Adds the code of an error reply."""
        self._first = self._first or (code if code in _UNUSABLE else "")

    def check(self, *, is_write: bool = False) -> None:
        """Raises a StoreError if one of the added codes means that the whole server is unusable.
        Called after the last reply was read. `is_write`: True if the replies answer writes; if
        hotkv's user lacks only the right to write, the error is a RefusedError."""
        if error := unusable(self._first, is_write=is_write):
            raise error
