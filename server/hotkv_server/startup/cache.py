"""Makes the core from the settings, and restores the blocks of an earlier server."""

from hotkv_proto import native
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.readers import ReaderMemory
from hotkv_server.cache.room.policies.hotness import Hotness
from hotkv_server.cache.values import CoreConfig
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory import numa
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.node.persistence import state_of, take_over
from hotkv_server.settings import Settings
from hotkv_server.startup import StartError
from hotkv_server.startup.access import tenant_shares
from hotkv_server.startup.capabilities import OpenedBelow

START_CHECK_S = 0.3
"""The rest is compared when it is first loaded."""
UNWRITTEN_SHARE = 0.25
"""Most that an owner's stores may reserve before they have written it. An engine writes what a
step computes within seconds: a small part of an arena that is worth having."""


def load_kernels(settings: Settings) -> None:
    """Otherwise the first store would wait for seconds."""
    native.require("hotkv_proto.table_reading")
    if settings.integrity.stride:
        native.require("hotkv_server.integrity.sum_kernels")


def open_cache(
    settings: Settings, memory: NodeMemory, below: OpenedBelow | None = None
) -> tuple[CacheCore, Verifier]:
    """Compares restored blocks with their checksums for at most START_CHECK_S.
    Blocks. Raises StartError."""
    config = CoreConfig(
        memory.num_bytes,
        memory.slab_bytes,
        settings.arena.capacity,
        unadmitted_share=settings.leases.unadmitted_share,
        unwritten_share=UNWRITTEN_SHARE,
        residency_share=settings.residency.share,
        residency_grace_s=settings.residency.grace_s,
        client_memory_bytes=settings.client_memory_bytes,
        check_stride=settings.integrity.stride,
        tenants=tenant_shares(settings.security),
        is_backed=False,
        part_starts=numa.parts(settings.arena.numa, memory.num_bytes, memory.slab_bytes).starts,
    )
    readers = ReaderMemory(memory.words, memory.marks)
    core = CacheCore(config, memory.table, Hotness(config.capacity), readers)
    if below is not None:
        below.add_books(core)
    verifier = Verifier(core, Region(memory.arena.address, memory.arena.num_bytes, "the arena"))
    check_s = START_CHECK_S if settings.integrity.stride else None
    try:
        take_over(core, memory, verifier, check_s)
        if below is not None and below.take_over(core):
            memory.save_state(state_of(core.catalog, memory.slab_bytes))
    except OSError as error:
        raise StartError(f"arena.dir: {error}") from error
    return core, verifier
