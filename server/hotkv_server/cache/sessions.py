"""Sessions, and the checks that every call of one passes.

Always true: a number names one session, and is never given to another; a session's key space is
known to the catalog. While the server drains nothing new begins, and what has begun can end.
"""

from collections.abc import Iterable

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_GROUPS, KeySpace, Representation
from hotkv_server.cache.catalog import Catalog
from hotkv_server.cache.room.tenants import TenantBook
from hotkv_server.cache.values import KeySpaceRecord, SessionRecord


def check_named(
    record: KeySpaceRecord,
    groups: Iterable[int],
    num_blocks: int,
    most_blocks: int,
    *,
    only_blocks: bool = False,
) -> None:
    """Raises unless a call may name so many blocks of these groups.

    `only_blocks`: representations are refused.
    """
    for group_index in groups:
        if not record.has(group_index):
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"groups.group_index is {group_index}; this key space has "
                f"{len(record.key_space.groups)} groups",
            )
        if only_blocks and group_index >= MAX_GROUPS:
            raise HotKVError(
                Reason.INVALID_FIELD,
                "groups.group_index names a representation; those go with their blocks, so "
                "name these",
            )
    if num_blocks > most_blocks:
        raise HotKVError(
            Reason.TOO_LARGE,
            f"the call names {num_blocks} blocks; at most {most_blocks} are accepted",
        )


class SessionBook:
    """Live sessions by number. `draining`: nothing new begins."""

    def __init__(self, catalog: Catalog, tenants: TenantBook) -> None:
        self.records: dict[int, SessionRecord] = {}
        self.draining = False
        self._catalog = catalog
        self._tenants = tenants
        self._next_number = 1

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, number: int) -> bool:
        return number in self.records

    def __repr__(self) -> str:
        return f"SessionBook({len(self)} sessions{', draining' if self.draining else ''})"

    def open(
        self,
        engine_id: str,
        role: str,
        key_space: KeySpace,
        now_s: float,
        representations: tuple[Representation, ...],
    ) -> SessionRecord:
        """Opens a session; its key space and representations are registered on first sight."""
        if not engine_id:
            raise HotKVError(
                Reason.INVALID_FIELD, "engine_id is empty; give one id to all sessions of an engine"
            )
        self.check_takes_new("takes no new sessions")
        key_space_id, groups = self._catalog.register(key_space, representations, now_s)
        self._catalog.enter(key_space_id)
        record = SessionRecord(self._next_number, engine_id, role, key_space_id, now_s, groups)
        self._next_number += 1
        self.records[record.number] = record
        return record

    def close(self, number: int, now_s: float) -> None:
        """Forgets a session whose leases and transfers have ended."""
        self._catalog.leave(self.records.pop(number).key_space_id, now_s)

    def record(self, number: int) -> SessionRecord:
        """The session with this number. Raises UNKNOWN_SESSION."""
        if number not in self.records:
            raise HotKVError(
                Reason.UNKNOWN_SESSION, "session_id is unknown or closed; open a new session"
            )
        return self.records[number]

    def owner(self, session: SessionRecord) -> str:
        """The owner that a session's share of common bounds counts for: its tenant, or its engine
        if no tenants are configured."""
        return (
            self._catalog.record(session.key_space_id).key_space.tenant
            if self._tenants.is_used
            else session.engine_id
        )

    def check_takes_new(self, refusal: str) -> None:
        """Raises DRAINING with this refusal while the server drains."""
        if self.draining:
            raise HotKVError(Reason.DRAINING, f"the server is draining and {refusal}")
