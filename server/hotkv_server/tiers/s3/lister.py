"""Finds out, on a thread, which packs (objects with blocks) a bucket has, and adds the packs to the
index (`s3.index`). A listing reads the names of the packs of one key space (a model in a
configuration).

Always true: a key space is listed only if its blocks are requested. The first requests for a key
space wait until its newest packs are known, but they do not wait for older packs of another key
space. Later requests are answered from the known packs at once; a listing that is due runs after
them, at most once in `refresh_s`.

The name of a pack contains its time, and names sort newest first. So a listing usually reads only
one page of names: it skips packs that are older than OVERLAP_S before the last listing. If a pack
appears more than OVERLAP_S after the time in its name, for example because the clock of its node is
slow, this node may miss it until its next start. If the clock of this node jumps by more than
JUMP_S, the next listing of a key space skips no packs.

If a pack can't be read, the other packs of its key space stay usable, and later listings try to
read it again. But a listing fails if more than LISTS_AT_ONCE packs can't be read. The first listing
of a key space also fails if none of the newest packs can be read. The reason: a store may fail all
reads for a while, and then all packs would count as absent. Packs that the store forbids
(`DeniedError`) don't count as failed reads here, because the store may forbid them for ever.

Memory is bounded. The lister remembers at most MAX_SPACES key spaces, and reads at most MAX_PACKS
names in a listing. It keeps the names of packs from the last OVERLAP_S, and at most MAX_UNREAD
names of packs that can't be read.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hotkv_server.tiers.remote.client import LostError, StoreError, UnusableError
from hotkv_server.tiers.s3.bucket import Bucket, DeniedError
from hotkv_server.tiers.s3.index import PackIndex
from hotkv_server.tiers.s3.packs import (
    Space,
    age_at,
    age_of,
    folder_of,
    list_bytes,
    parsed,
    path_of,
)

log = logging.getLogger(__name__)

OVERLAP_S = 120.0
"""A listing (which reads the names of a key space's packs) skips the packs that are older than the
last listing by more than this time; see the module."""
JUMP_S = OVERLAP_S / 2
"""If this node's clock jumps by this time or more, the next listing of a key space's packs skips no
packs."""
UNSEEN = 10**16
"""A value of `_Folder.horizon` with which a listing skips no packs."""
MAX_SPACES = 4096
"""Most key spaces (each in one generation) that the lister remembers."""
MAX_PACKS = 16384
"""Most names in a listing: 256 GiB of blocks in packs of 16 MiB."""
LISTS_AT_ONCE = 16
"""Number of packs whose lists of blocks are read at the same time. If the store fails to read more
packs than this, the listing fails."""
MAX_UNREAD = 256
"""Most packs of a key space that are tried again because they could not be read. If there are more,
the oldest of them are not found until the next start."""
FIRST_PACKS = 256
"""Number of the newest packs whose lists of blocks are read before the first request is
answered."""


@dataclass(slots=True)
class _Folder:
    """The state of a key space (a model in a configuration) in one generation (a number that each
    flush raises), whose packs (objects with blocks) are in one folder of the bucket.

    `is_known`: True once the newest packs are in the index.
    `is_queued`: True while a listing is queued or under way.
    `looks`: number of listings that have ended, successful or not.
    `due_s`: when the next listing is due, a time of time.monotonic.
    `horizon`: the next listing skips packs of this age (`packs.age_of`) and older.
    `clock_s`: difference between the wall clock and the monotonic clock, in seconds, when a listing
        last skipped no packs. If it changes, the wall clock has jumped.
    `seen`: names of packs, newer than the horizon, that a listing need not read again.
    `unread`: names of packs that could not be read. Each listing tries the first LISTS_AT_ONCE of
        them again, and moves the names that still can't be read to the end.
    `is_warned`: True once a warning has said that packs can't be read.
    `error`: the error of the last listing; None if it succeeded.
    """

    is_known: bool = False
    is_queued: bool = False
    looks: int = 0
    due_s: float = 0.0
    horizon: int = UNSEEN
    clock_s: float = 0.0
    seen: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)
    is_warned: bool = False
    error: StoreError | None = None


class Lister:
    """Finds out which packs (objects with blocks) the bucket has, and adds them to the index; see
    the module. Thread-safe.

    `index`: gets the packs that listings find.
    `connect`: returns the bucket; raises StoreError.
    `refresh_s`: least time between two listings of a key space.
    `timeout_s`: longest time for a request to the bucket.
    """

    def __init__(
        self,
        index: PackIndex,
        connect: Callable[[], Bucket],
        *,
        refresh_s: float,
        timeout_s: float,
    ) -> None:
        self._index = index
        self._connect = connect
        self._refresh_s = refresh_s
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._folders: OrderedDict[Space, _Folder] = OrderedDict()
        self._queue: deque[tuple[Space, _Folder]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="hotkv-s3-lister", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Lister({len(self._folders)} key spaces, {len(self._queue)} to look at)"

    def ask(self, space: Space, until_s: float) -> None:
        """Queues a listing of a key space's packs (objects with blocks) if a listing is due. If the
        key space was never listed, waits until its newest packs are in the index. Raises StoreError
        if these packs are not in the index at `until_s`, a time of time.monotonic, or if the
        listing fails."""
        with self._changed:
            folder = self._folder(space)
            is_due = not folder.is_known or time.monotonic() >= folder.due_s
            if is_due and not folder.is_queued:
                folder.is_queued = True
                self._queue.append((space, folder))
                self._changed.notify_all()
            looks = folder.looks
            while not folder.is_known:
                if self._is_closed:
                    raise LostError("is not asked any more")
                if folder.looks > looks and folder.error is not None:
                    raise type(folder.error)(str(folder.error))
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    # Don't raise a LateError, because a long listing must not make the tier count
                    # as down.
                    raise LostError("has not listed the packs of a key space yet")
                self._changed.wait(left_s)

    def forget_others(self, fingerprint: str, space: Space | None) -> None:
        """Forgets the state of a key space (a model in a configuration) in all generations (numbers
        that each flush raises) but one.

        `fingerprint`: name of the key space.
        `space`: names the generation whose state stays (`packs.Space`); None: forgets the state in
            all generations.
        """
        with self._changed:
            for one in [one for one in self._folders if one.partition("/")[0] == fingerprint]:
                if one != space:
                    del self._folders[one]

    def is_alive(self) -> bool:
        """Returns False if the thread has died. True once `stop` was called."""
        return self._is_closed or self._thread.is_alive()

    def stop(self) -> None:
        """Makes the thread end after the listing under way. Callers that wait in `ask` get
        LostError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread that lists packs (`stop`), and blocks until it has ended."""
        self.stop()
        self._thread.join()

    def _folder(self, space: Space) -> _Folder:
        folder = self._folders.get(space)
        if folder is None:
            folder = self._folders[space] = _Folder()
            while len(self._folders) > MAX_SPACES:
                self._folders.popitem(last=False)
        self._folders.move_to_end(space)
        return folder

    def _work(self) -> None:
        bucket: Bucket | None = None
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                space, folder = self._queue.popleft()
            failed: StoreError | None = None
            is_whole = True
            try:
                bucket = bucket or self._connect()
                is_whole = self._look(bucket, space, folder)
            except StoreError as error:
                bucket, failed = None, error
                log.debug("packs of %s are not known: s3 %s", space, error)
            except Exception as error:  # Catch any exception, so that the thread goes on.
                bucket, failed = None, LostError(f"can't be listed: {type(error).__name__}")
                log.exception("packs of %s are not known: %s", space, type(error).__name__)
            with self._changed:
                folder.is_queued = not is_whole
                if not is_whole:
                    self._queue.append((space, folder))
                folder.looks += 1
                folder.error = failed
                folder.due_s = time.monotonic() + self._refresh_s
                self._changed.notify_all()

    def _look(self, bucket: Bucket, space: Space, folder: _Folder) -> bool:
        """Lists the packs (objects with blocks) of a key space, and adds them to the index. Returns
        False if it has stopped early because requests wait for another key space; the next listing
        then continues from this point. Also stops, and returns True, if the generation has ended
        (`forget_others`) or the lister closes. Raises StoreError."""
        horizon = age_at(int((time.time() - OVERLAP_S) * 1e6))
        clock_s = time.time() - time.monotonic()
        if folder.horizon == UNSEEN or abs(clock_s - folder.clock_s) > JUMP_S:
            folder.horizon, folder.clock_s = UNSEEN, clock_s

        def is_enough(last: str) -> bool:
            is_old = bool(list_bytes(last)) and age_of(last) >= folder.horizon
            return is_old or self._is_closed

        names = bucket.names(folder_of(space), MAX_PACKS, is_enough, self._timeout_s)
        unread, again = set(folder.unread), folder.unread[:LISTS_AT_ONCE]
        # The next listing tries other packs, even if this listing fails.
        folder.unread = folder.unread[LISTS_AT_ONCE:] + again
        new = [one for one in names if one not in unread and self._is_new(space, folder, one)]
        num_failed = 0
        for at in range(0, len(new), LISTS_AT_ONCE):
            if self._is_closed:
                return True
            batch = new[at : at + LISTS_AT_ONCE]
            has_room, failed = self._learn(bucket, space, batch)
            self._warn(space, folder, failed)
            errors = [error for error in failed.values() if not isinstance(error, DeniedError)]
            num_failed += len(errors)
            is_first = at == 0 and not folder.is_known
            if num_failed > LISTS_AT_ONCE or (errors and is_first and len(failed) == len(batch)):
                raise errors[0]
            folder.unread += failed
            if len(folder.unread) > MAX_UNREAD:
                newest = set(sorted(folder.unread)[:MAX_UNREAD])
                folder.unread = [name for name in folder.unread if name in newest]
            if not has_room:
                break
            with self._changed:
                folder.seen.update(batch)
            if at + LISTS_AT_ONCE >= FIRST_PACKS:
                self._know(folder)
                with self._changed:
                    if self._folders.get(space) is not folder:
                        return True
                    if not all(other.is_known for _, other in self._queue):
                        return False
        with self._changed:
            folder.horizon = horizon
            folder.seen = {name for name in folder.seen if age_of(name) < folder.horizon}
        self._know(folder)
        if again:
            _, failed = self._learn(bucket, space, again)
            read = set(again) - set(failed)
            folder.unread = [name for name in folder.unread if name not in read]
        return True

    def _is_new(self, space: Space, folder: _Folder, name: str) -> bool:
        return (
            bool(list_bytes(name))
            and age_of(name) < folder.horizon
            and name not in folder.seen
            and not self._index.has(path_of(space, name))
        )

    def _know(self, folder: _Folder) -> None:
        with self._changed:
            folder.is_known = True
            self._changed.notify_all()

    def _learn(
        self, bucket: Bucket, space: Space, names: list[str]
    ) -> tuple[bool, dict[str, StoreError]]:
        """Reads the lists of blocks of these packs (objects with blocks), and adds the packs to the
        index. Returns two results. The first is False if the index had no room for one of the
        packs; then it has no room for older packs either. The second has the error of each pack
        whose list could not be read, by name. Raises StoreError if the store can't be used."""
        until_s = time.monotonic() + self._timeout_s
        wanted = [(path_of(space, name), [0], [list_bytes(name)]) for name in names]
        has_room, failed = True, dict[str, StoreError]()
        for name, front in zip(names, bucket.ranges(wanted, until_s), strict=True):
            if front is None:
                continue
            if isinstance(front, UnusableError) and not isinstance(front, DeniedError):
                raise front
            if isinstance(front, StoreError):
                failed[name] = front
                continue
            pack = parsed(space, name, front[0])
            if pack is None:
                log.warning("the list of a pack is damaged: %s", path_of(space, name))
            else:
                has_room = self._index.add(pack) and has_room
        return has_room, failed

    def _warn(self, space: Space, folder: _Folder, failed: dict[str, StoreError]) -> None:
        for name, error in failed.items():
            if not folder.is_warned:
                folder.is_warned = True
                log.warning("packs can't be read, such as %s: s3 %s", path_of(space, name), error)
