"""Finds out, on a thread, which packs of a key space a bucket has, and adds them to the index.

Always true: a key space is listed only if its blocks are requested. Its first requests wait until
its newest packs are known, but not for another key space's older packs. Later requests are answered
from known packs; a due listing runs after them, at most once in `refresh_s`.

Names sort newest first, so a listing can stop early, mostly after one page of names: it skips packs
that are more than OVERLAP_S older than the start of the last listing that succeeded. A pack that
appears later than that, from a node with a slow clock, may be missed until the next start. After a
jump of this node's clock nothing is skipped.

A pack that can't be read is retried by later listings. A listing fails if more than
LISTS_AT_ONCE packs can't be read. A key space's first one fails as soon as none of its newest
LISTS_AT_ONCE can: the store may be failing all reads for a while. Forbidden packs don't count,
as they may be forbidden for ever. Memory is bounded.
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
"""See the module."""
JUMP_S = OVERLAP_S / 2
"""A jump of the clock by so much makes the next listing skip nothing."""
UNSEEN = 10**16
"""`_Folder.horizon` that skips nothing."""
MAX_SPACES = 4096
"""Most key spaces, each in one generation, that are remembered."""
MAX_PACKS = 16384
"""Most names in a listing: 256 GiB of blocks in packs of 16 MiB."""
LISTS_AT_ONCE = 16
"""Packs whose lists are read at once."""
MAX_UNREAD = 256
"""Most unread packs of a key space that are retried. Older ones are not found until the next
start."""
FIRST_PACKS = 256
"""Newest packs that are read before the first request is answered."""


@dataclass(slots=True)
class _Folder:
    """A key space's packs in one generation.

    `is_known`: the newest packs are in the index.
    `is_queued`: a listing is queued or under way.
    `looks`: listings that have ended, with success or not.
    `due_s`: of the next listing.
    `horizon`: packs of this age (`packs.age_of`) and older are skipped.
    `clock_s`: wall clock minus monotonic clock when a listing last skipped nothing; it changes if
        the clock jumps.
    `seen`: packs newer than the horizon that need no reading.
    `unread`: packs that could not be read; each listing retries the first LISTS_AT_ONCE and moves
        failures to the end.
    `is_warned`: unread packs have been logged.
    `error`: of the last listing.
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
    """See the module. Thread-safe.

    `connect`: raises StoreError.
    `refresh_s`: least time between two listings of a key space.
    `timeout_s`: of a request.
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
        """Queues a listing if one is due. Waits for a key space's first; raises StoreError if it
        fails or has not ended at `until_s`."""
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
                    # Not a LateError: a long listing must not make the tier count as down.
                    raise LostError("has not listed the packs of a key space yet")
                self._changed.wait(left_s)

    def forget_others(self, fingerprint: str, space: Space | None) -> None:
        """Forgets a key space's other generations; all if `space` is None."""
        with self._changed:
            for one in [one for one in self._folders if one.partition("/")[0] == fingerprint]:
                if one != space:
                    del self._folders[one]

    def is_alive(self) -> bool:
        """False if the thread has died; True after `stop`, which ends it on purpose."""
        return self._is_closed or self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread after the listing under way. Callers in `ask` get LostError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Blocks until the thread has ended."""
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
        """Lists a key space. False if it has stopped early for requests of another key space;
        the next listing continues. Also stops, with True, if the generation has ended or the
        lister closes. Raises StoreError."""
        horizon = age_at(int((time.time() - OVERLAP_S) * 1e6))
        clock_s = time.time() - time.monotonic()
        if folder.horizon == UNSEEN or abs(clock_s - folder.clock_s) > JUMP_S:
            folder.horizon, folder.clock_s = UNSEEN, clock_s

        def is_enough(last: str) -> bool:
            is_old = bool(list_bytes(last)) and age_of(last) >= folder.horizon
            return is_old or self._is_closed

        names = bucket.names(folder_of(space), MAX_PACKS, is_enough, self._timeout_s)
        unread, again = set(folder.unread), folder.unread[:LISTS_AT_ONCE]
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
        """Reads packs' lists into the index. Returns whether the index had room for all (if not,
        it has none for older packs either), and the errors of the packs that could not be read.
        Raises StoreError if the store can't be used."""
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
