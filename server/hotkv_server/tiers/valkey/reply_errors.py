"""Messages that say how to make a server usable, by error code: an error's first word. Always
true: they have no secrets, so they never quote replies to AUTH and HELLO, which may repeat a
password.
"""

from hotkv_server.tiers.remote.client import RefusedError, StoreError, UnusableError

FULL_CODES = ("OOM", "MISCONF", "NOREPLICAS")
"""The server refuses writes, but not reads."""
NO_WRITE_CODES = (*FULL_CODES, "NOPERM")
"""A write may get these although the user may read."""
INCOMPLETE = "INCOMPLETE"
"""Our own: a cluster can't serve a key."""
INCOMPLETE_CODES = ("MOVED", "ASK", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN")
"""Only servers of a cluster answer with these."""
STANDALONE = "STANDALONE"
"""Our own: no cluster, though the settings name one."""
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
    """The error if `code` makes the whole server unusable, else None; a RefusedError if only
    writes are forbidden."""
    if is_write and code == "NOPERM":
        return RefusedError(f"refuses writes, so it only serves reads: it {_UNUSABLE[code]}")
    words = _UNUSABLE.get(code)
    return UnusableError(words) if words else None


class Errors:
    """Keeps a batch's first code that makes the server unusable."""

    def __init__(self) -> None:
        self._first = ""

    def add(self, code: str) -> None:
        self._first = self._first or (code if code in _UNUSABLE else "")

    def check(self, *, is_write: bool = False) -> None:
        """To be called after the last reply. Raises as `unusable` says."""
        if error := unusable(self._first, is_write=is_write):
            raise error
