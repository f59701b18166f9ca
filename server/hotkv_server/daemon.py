"""The life of the daemon: maps its memory, prefaults the first part, restores the blocks of an
earlier server, binds its sockets; then it is ready. SIGTERM drains and stops it.

This module decides the order of the steps; the package `startup` implements them. If an
invariant of the core is broken, the process exits with BROKEN_STATUS, without closing or saving
anything, as if it were killed.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import NoReturn

import hotkv_proto
from hotkv_proto.limits import allocated_bytes
from hotkv_server import systemd
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.runtime import HOST
from hotkv_server.device.start import CudaError, CudaPart, look_in_background, open_part
from hotkv_server.memory.arena import ARENA_FILE, NodeMemory
from hotkv_server.memory.clerk import full_pool
from hotkv_server.node.capability import run_all
from hotkv_server.node.device_watch import DeviceWatch
from hotkv_server.node.health import keep_checking
from hotkv_server.node.node import STALLED_WORK_S, Node
from hotkv_server.settings import Settings
from hotkv_server.startup import StartError, process
from hotkv_server.startup.arena import may_be_registered, open_memory
from hotkv_server.startup.cache import load_kernels, open_cache
from hotkv_server.startup.capabilities import OpenedBelow, attach_all, open_below
from hotkv_server.startup.listeners import Listeners
from hotkv_server.startup.places import lock_runtime_dir
from hotkv_server.startup.preflight import Footprint, check_start
from hotkv_server.startup.progress import Progress
from hotkv_server.startup.reload import Reloader
from hotkv_server.startup.running_settings import RunningSettings
from hotkv_server.wire.server import RpcServer

log = logging.getLogger(__name__)

BROKEN_STATUS = 70
"""EX_SOFTWARE; a service manager starts the server again."""
LAST_WORDS_S = 0.5
"""How long a server with a broken invariant stays up, so that health checks and systemd learn of
it."""
STOP_S = 40.0
"""Longest stop after the drain: ends transfers and sessions, and writes files."""
SAVE_WAIT_S = 5.0
NUM_POOL_THREADS = min(32, 4 + (os.cpu_count() or 1))
"""For calls of the event loop that take long."""
STOP_CALLS_S = 0.5
"""For calls that are still being answered after the drain."""


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """The node, and the parts that must be closed after it.

    cuda: the server's GPUs and copy engine.
    below: None without tiers.
    """

    node: Node
    memory: NodeMemory
    cuda: CudaPart
    below: OpenedBelow | None
    is_new: bool = True
    """No blocks of an earlier server."""

    @staticmethod
    def open(settings: Settings, progress: Progress, *, reset: bool) -> "OpenedNode":
        """Maps the memory, opens devices and tiers, and restores blocks. Blocks. Raises StartError.

        reset: drops the blocks of an earlier server.
        """
        looking = look_in_background(settings.copy_)
        file = settings.arena_dir / ARENA_FILE
        progress.at(
            f"bringing in an arena of {settings.arena.bytes >> 20} MiB",
            lambda: f": {allocated_bytes(file) / settings.arena.bytes:.0%}",
        )
        memory = open_memory(settings, reset=reset)
        # A failed start keeps the files of an earlier server, and removes its own.
        is_new = memory.leftover is None
        with contextlib.ExitStack() as undo:
            undo.callback(memory.discard if is_new else memory.release)
            host = HostCopyEngine(settings.copy_.num_threads)
            progress.at("looking for GPUs")
            try:
                cuda = open_part(settings, memory, host, looking.result())
            except CudaError as error:
                host.close()
                raise StartError(str(error)) from error
            undo.callback(cuda.close)
            arena = Region(memory.arena.address, memory.arena.num_bytes, "the arena")
            progress.at("opening the tiers")
            below = open_below(settings, arena, reset=reset)
            if below is not None:
                undo.callback(below.close)
            progress.at("making the cache" if is_new else "restoring the blocks")
            core, verifier = open_cache(settings, memory, below)
            tiers = None if below is None else below.drive(core, verifier, memory)
            node = Node(core, memory, cuda.copy_engine, verifier, cuda.devices, tiers)
            undo.pop_all()
        return OpenedNode(node, memory, cuda, below, is_new)

    def fill(self) -> None:
        """Prefaults the rest of the block table and the arena, on a thread."""
        loop, node, memory = asyncio.get_running_loop(), self.node, self.memory

        def on_filled(filled_bytes: int, coming_bytes: int) -> None:
            loop.call_soon_threadsafe(node.growth.grow, filled_bytes, coming_bytes)

        def backed() -> Iterator[int]:
            for num_entries in memory.records.back_rest():
                loop.call_soon_threadsafe(node.core.space.index.back, num_entries)
                yield num_entries

        # Pages settle into huge pages here, or before `ArenaPinner` pins them.
        def start() -> None:
            memory.filling.start(on_filled, settles=self.cuda.pinner is None, first=backed())

        node.arena_size.fill = start
        start()

    def close(self, *, keep: bool, has_served: bool = True) -> None:
        """To be called after the node's end. If a capability raises, closes the rest first. Blocks.

        keep: leaves the blocks in memory for the next server; else removes them.
        has_served: False after a failed start, which keeps `memory.arena.KEPT_FILES` (such as
            names of engines) in any case.
        """
        self.memory.filling.close()
        self.cuda.close()
        if self.below is not None:
            self.below.close()
        try:
            run_all(one.release for one in self.node.capabilities)
        finally:
            self._leave(keep=keep, has_served=has_served)

    def _leave(self, *, keep: bool, has_served: bool) -> None:
        if any(one.is_moving for one in self.node.core.below):
            # It may still write slots: the next server gets the arena when the kernel has ended
            # this process.
            log.error("a move from a tier has not ended: the arena stays locked until it has")
            return
        if keep:
            try:
                self.node.clerk.do(self.node.save_use).result(SAVE_WAIT_S)
            except futures.TimeoutError:
                log.error("the arena's directory hangs: times of last use are not saved")
            self.memory.release()
        else:
            if self.below is not None:
                self.below.discard()
            if has_served:
                self.memory.remove()
            else:
                self.memory.discard()


def watch_all(
    opened: OpenedNode, settings: Settings, listeners: Listeners, reloader: Reloader
) -> None:
    """Makes `Health` watch what the node does not watch itself."""
    health, copies, cuda = opened.node.health, opened.cuda.copy_engine, opened.cuda
    health.watch(
        "a copy thread",
        lambda: copies.is_alive_on(HOST),
        lambda now_s: copies.stalled_s_on(HOST, now_s),
        STALLED_WORK_S,
    )
    health.watch_fault("the arena's pin", cuda.fault)
    health.watch("the thread that brings the arena in", opened.memory.filling.is_alive)
    if cuda.pinner is not None:
        health.watch("the thread that pins the arena", cuda.pinner.is_alive)
    for path in (*settings.engine_sockets, settings.admin_socket):
        health.watch(f"the socket {path.name}", path.is_socket)
    health.watch("the thread that reads the settings", reloader.is_alive)
    if (http := listeners.http) is not None:
        health.watch("the HTTP thread", http.is_alive, http.stalled_s)


def follow_size(settings: Settings, opened: OpenedNode) -> None:
    """If an earlier server's arena was larger than `arena.bytes`, shrinks it now."""
    size = opened.node.arena_size
    size.pinner = opened.cuda.pinner
    if may_be_registered():
        size.keeps_memory = (
            "this machine has GPUs, whose engines may have registered the arena: they would go on "
            "reading pages that were given back. Start the server with --reset, and the engines "
            "anew, to shrink"
        )
    if size.num_bytes > settings.arena.bytes:
        size.begin(settings.arena.bytes)


class StateReporter:
    """Reports the server's state to gRPC's health service and to systemd."""

    def __init__(self, node: Node, rpc: RpcServer, cuda: CudaPart) -> None:
        self._node = node
        self._rpc = rpc
        self._cuda = cuda
        self._devices = DeviceWatch(
            cuda.devices, cuda.copy_engine, node.sessions, node.health, STALLED_WORK_S
        )
        self._told = ""

    async def tell(self) -> None:
        """Signals systemd's watchdog only without problems."""
        self._devices.look()
        node, problems = self._node, self._node.health.problems(time.monotonic())
        draining = node.core.draining
        self._rpc.set_health(is_ready=not problems and not draining, is_alive=not problems)
        background = (node.memory.filling.progress(), self._cuda.progress())
        partial = node.health.partial_problems().values()
        status = "; ".join(
            filter(
                None,
                (
                    *(problems or [*["serving"] * (not draining), *partial]),
                    "draining" * draining,
                    *background,
                ),
            )
        )
        if status != self._told:
            self._told = status
            stopping = ["STOPPING=1", systemd.extension(node.drain_timeout_s + STOP_S)]
            systemd.notify(f"STATUS={status}", *(stopping if draining else []))
        if not problems:
            systemd.notify("WATCHDOG=1")


async def end_broken(node: Node, herald: StateReporter) -> NoReturn:
    """Exits without closing anything, so that the next start recovers as after a kill."""
    node.abandon()
    await herald.tell()
    await asyncio.sleep(LAST_WORDS_S)
    log.critical("ends status=%d; the next start keeps the blocks that hold", BROKEN_STATUS)
    logging.shutdown()
    os._exit(BROKEN_STATUS)


async def wait_for_end(node: Node) -> None:
    """Until the node has drained, or an invariant has broken."""
    waits = [asyncio.create_task(event.wait()) for event in (node.drained, node.health.broken)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def say_ready(
    settings: Settings, opened: OpenedNode, listeners: Listeners, started_s: float
) -> None:
    """`started_s`: of the monotonic clock."""
    log.info(
        "ready version=%s socket=%s arena_bytes=%d filled_bytes=%d huge_bytes=%d copy_threads=%d "
        "http_port=%s tcp_port=%s start_s=%.2f",
        hotkv_proto.__version__,
        settings.grpc_socket,
        settings.arena.bytes,
        opened.memory.filling.filled_bytes,
        opened.memory.arena.huge_bytes,
        settings.copy_.num_threads,
        listeners.http.port if listeners.http else "none",
        listeners.rpc.tcp_port or "none",
        time.monotonic() - started_s,
    )
    systemd.notify("READY=1")


async def _open(
    settings: Settings, progress: Progress, *, reset: bool, load: Callable[[], Settings] | None
) -> tuple[OpenedNode, Listeners, Reloader]:
    """All parts of a server, which then answers calls. Raises StartError. Arguments as of
    `serve`."""
    progress.at("checking the settings")
    if problems := check_start(settings):
        raise StartError("\n".join(problems))
    progress.at("loading the kernels of copies and checksums")
    load_kernels(settings)
    opened = OpenedNode.open(settings, progress, reset=reset)
    node, loop = opened.node, asyncio.get_running_loop()
    node.drain_timeout_s = settings.drain_timeout_s
    loop.set_exception_handler(node.health.on_loop_error)
    try:
        # An earlier Ctrl-C cancels the task here. While gRPC starts, it would make gRPC log
        # errors.
        await asyncio.sleep(0)
        progress.at("starting the capabilities")
        attach_all(settings, node)
    except BaseException:
        opened.close(keep=not opened.is_new, has_served=False)
        raise
    try:
        node.start(settings.integrity.scrub_bytes_per_s)
        running = RunningSettings(settings)
        node.topics["config"] = running.topic()
        progress.at("opening the sockets")
        listeners = await Listeners.open(settings, node)
    except BaseException:
        try:
            await node.close()
        finally:
            opened.close(keep=not opened.is_new, has_served=False)
        raise
    reloader = Reloader(load or (lambda: settings), settings, running, node, listeners)
    return opened, listeners, reloader


async def serve(
    settings: Settings,
    progress: Progress,
    *,
    reset: bool = False,
    load: Callable[[], Settings] | None = None,
) -> None:
    """Runs the server until SIGTERM, SIGINT or an operator's drain, and to the end of its
    transfers. Raises StartError.

    progress: has begun; ends when the server is ready.
    reset: drops the blocks that an earlier server left.
    load: reads the settings again at SIGHUP; raises ValueError. None: SIGHUP changes nothing.
    """
    started_s = time.monotonic()
    # By default SIGHUP would end the process. One that comes early reloads when the server is
    # ready.
    asked_early = list[int]()
    signal.signal(signal.SIGHUP, lambda number, _: asked_early.append(number))
    process.end_at_sigterm()
    process.prepare()
    asyncio.get_running_loop().set_default_executor(full_pool(NUM_POOL_THREADS, "hotkv-pool"))
    log.info(
        "starting version=%s runtime_dir=%s arena_bytes=%d",
        hotkv_proto.__version__,
        settings.runtime_dir,
        settings.arena.bytes,
    )
    footprint, lock_fd = Footprint(settings), None
    try:
        lock_fd = lock_runtime_dir(settings.runtime_dir)
        opened, listeners, reloader = await _open(settings, progress, reset=reset, load=load)
    except BaseException:
        footprint.remove(lock_fd)
        raise
    node, loop = opened.node, asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: node.drain(reloader.drain_timeout_s))
    loop.add_signal_handler(signal.SIGHUP, reloader.begin)
    progress.at("giving back memory of the start")
    process.settle()
    progress.end()
    say_ready(settings, opened, listeners, started_s)
    if asked_early:
        reloader.begin()
    opened.cuda.start()
    if settings.arena.prefault:
        opened.fill()
    follow_size(settings, opened)
    if listeners.http is not None:
        listeners.http.routes.prepare()
    watch_all(opened, settings, listeners, reloader)
    herald = StateReporter(node, listeners.rpc, opened.cuda)
    checking = node.health.run("health", keep_checking(node.health, herald.tell))
    await wait_for_end(node)
    if node.health.breach:
        await end_broken(node, herald)
    checking.cancel()
    await herald.tell()
    await listeners.rpc.stop(STOP_CALLS_S)
    try:
        await node.close()
    finally:
        listeners.descriptors.close()
        if listeners.http is not None:
            listeners.http.close()
        opened.close(keep=settings.arena.keep)
        os.close(lock_fd)
    log.info("stopped")
