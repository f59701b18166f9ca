"""The server's reports for operators, by topic: server, tiers, key spaces, sessions, blocks. The
command `hotkv`, the status page and its API show them. On the event loop only."""

import heapq
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

import orjson

import hotkv_proto
from hotkv_proto import versions
from hotkv_proto.errors import invalid
from hotkv_proto.keys import KeySpace
from hotkv_proto.table import Words
from hotkv_server.cache import inspect
from hotkv_server.cache.inspect import Census
from hotkv_server.cache.values import DISK_TIER, HOST_TIER
from hotkv_server.dataplane.cuda.values import CudaCopyFigures
from hotkv_server.device.devices import Devices, uuid_text
from hotkv_server.device.runtime import DeviceInfo
from hotkv_server.monitoring.counts import census, counters, gauges
from hotkv_server.monitoring.verdicts import verdicts
from hotkv_server.node.capability import MAX_KEY_SPACE_ID, Figures, Filters, Topic
from hotkv_server.node.event_loop import Breaks
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node

# ------------------------------------------------------------------------------------------- Topics

MAX_ROWS = 256
"""Of sessions or key spaces, unless the caller asks for more."""
MAX_KEY_SPACES = 4096
KEY_SPACES_BYTES = 3 << 20
"""Of a list of key spaces: with the answer's other fields it fits into a gRPC message."""
DEFAULT_BLOCKS, MAX_BLOCKS = 100, 10_000
MAX_TOKEN_DIGITS = 20
SERVED_BLOCKS = 2000
"""Most rows in a page of blocks, even if the caller asks for more: the event loop serves no
other call while it makes them."""


def all_topics(node: Node) -> dict[str, Topic]:
    """Those of the cache, the node, the process and the capabilities."""
    found = {**_topics(node), **node.topics}
    for one in node.capabilities:
        found.update(one.topics())
    return found


def _topics(node: Node) -> dict[str, Topic]:
    async def server(filters: Filters) -> Figures:
        counted, now_s = await census(node), time.monotonic()
        figures = server_figures(node, now_s)
        judged = {
            **figures, "session_count": len(node.sessions), "tiers": tier_rows(node, counted)
        }  # fmt: skip
        for one in node.capabilities:
            judged.update(one.status(has_names=False))
        return {
            **figures,
            "verdicts": verdicts(judged),
            "counters": {**counters(node), **gauges(node, counted)},
            "devices": device_figures(node.devices),
        }

    async def tiers(filters: Filters) -> Figures:
        return {"tiers": tier_rows(node, await census(node))}

    async def key_spaces(filters: Filters) -> Figures:
        most = filters.page_size(MAX_ROWS, MAX_KEY_SPACES)
        wanted = filters.whole("key_space_id", MAX_KEY_SPACE_ID)
        counted = await census(node)
        found = inspect.key_spaces(node.core, counted, 0 if wanted else most)
        rows: list[Figures] = []
        room = KEY_SPACES_BYTES
        # Most blocks first: if names are long, the answer may have no room for all.
        for one in sorted(found, key=lambda one: -one.num_blocks):
            if wanted in (0, one.number):
                row = _whole_row(node, one)
                room -= len(orjson.dumps(row))
                if room < 0:
                    break
                rows.append(row)
        rows.sort(key=lambda row: int(row["key_space_id"]))
        return {"key_space_count": len(node.core.key_spaces), "key_spaces": rows}

    def sessions(filters: Filters) -> Figures:
        rows = session_rows(node, node.sessions, time.monotonic())
        return {"session_count": len(node.sessions), "sessions": rows}

    return {
        "server": Topic(server),
        "tiers": Topic(tiers),
        "key_spaces": Topic(key_spaces, ("key_space_id", "page_size")),
        "sessions": Topic(sessions),
        "blocks": Topic(
            lambda filters: _blocks(node, filters),
            ("key_space_id", "hash_prefix", "page_size", "page_token"),
        ),
        "hot_blocks": Topic(
            lambda filters: _hot_blocks(node, filters), ("key_space_id", "page_size")
        ),
    }


# The server


def server_figures(node: Node, now_s: float) -> Figures:
    """state: `ready`, `draining` or `unhealthy`.
    problems: a sentence for each.
    limits: the same, of parts that only some sessions need.
    progress: how far the arena is prefaulted, or why that ended early; empty when it is
        complete.
    """
    problems, lag = node.health.problems(now_s), node.lag.read()
    return {
        "version": hotkv_proto.__version__,
        "protocol_version": versions.NEWEST_VERSION,
        "oldest_protocol_version": versions.OLDEST_VERSION,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "epoch": node.epoch,
        "state": "unhealthy" if problems else "draining" if node.core.draining else "ready",
        "problems": list(problems),
        "limits": list(node.health.partial_problems().values()),
        "progress": node.memory.filling.progress(),
        "uptime_s": now_s - node.started_s,
        "loop": {
            "lag_p50_s": lag.p50_s,
            "lag_p99_s": lag.p99_s,
            "lag_longest_s": lag.longest_s,
            "held_by": lag.held_by,
        },
    }


# Tiers


def tier_rows(node: Node, counted: Census) -> list[Figures]:
    """Host memory, then the tiers in the order of lookups. Lower tiers also have `activity`:
    reads, writes and problems."""
    rows = [_places(HOST_TIER, inspect.tier(node.core, counted))]
    if (lower := inspect.lower_tier(node.core)) is not None:
        rows.append(_places(DISK_TIER, lower))
    by_name = {row["name"]: row for row in rows}
    for told in node.offers.tier_rows():
        if told["name"] in by_name:
            by_name[told["name"]]["activity"] = told["activity"]
        else:
            rows.append(told)
    return rows


def _places(name: str, figures: inspect.RoomFigures) -> Figures:
    """Of a tier whose slots the core manages."""
    return {
        "name": name,
        "capacity_byte_count": figures.capacity_bytes,
        "used_byte_count": figures.used_bytes,
        "reserve_byte_count": figures.reserve_bytes,
        "unusable_byte_count": figures.pool.tail_bytes,
        "pinned_byte_count": figures.pinned_bytes,
        "block_count": figures.num_blocks,
        "free_slab_count": figures.num_free_slabs,
        "slab_byte_count": figures.slab_bytes,
        "sketch_byte_count": figures.sketch_bytes,
        "slab_classes": [
            {
                "slot_byte_count": one.slot_bytes,
                "slab_count": one.num_slabs,
                "slot_count": one.num_slots,
                "used_slot_count": one.num_used,
            }
            for one in figures.slab_classes
        ],
    }


# Key spaces


def key_space_row(node: Node, one: inspect.KeySpaceFigures) -> Figures:
    """Short, without secrets."""
    return {
        "key_space_id": one.number,
        "fingerprint": one.key_space.fingerprint.hex(),
        "tenant": one.key_space.tenant,
        "model": one.key_space.model,
        "model_name": node.names.model_of(one.key_space),
        "dtype": one.key_space.dtype,
        "group_count": len(one.key_space.groups),
        "block_count": one.num_blocks,
        "sketch_count": one.num_sketches,
    }


def _whole_row(node: Node, one: inspect.KeySpaceFigures) -> Figures:
    """All that an operator may see."""
    return {
        **key_space_row(node, one),
        "key_space": _key_space(one.key_space),
        "sketches": [
            {
                "group_index": kind.group_index,
                "format": kind.format,
                "version": kind.version,
                "shard_byte_counts": list(kind.shard_bytes),
            }
            for kind in one.sketches
        ],
    }


def _key_space(value: KeySpace) -> Figures:
    """By the field names of `hotkv.v1.KeySpace`."""
    return {
        "tenant": value.tenant,
        "model": value.model,
        "weights_identity": value.weights_identity,
        "dtype": value.dtype,
        "kv_dtype": value.kv_dtype,
        "hash_algorithm": value.hash_algorithm,
        "hash_seed": value.hash_seed,
        "hash_byte_count": value.hash_bytes,
        "hash_block_token_count": value.hash_block_tokens,
        "groups": [
            {
                "group_index": index,
                "kind": group.kind.name.lower().replace("_", " "),
                "block_token_count": group.block_tokens,
                "shard_byte_counts": list(group.shard_bytes),
                "window_token_count": group.window_tokens,
                "layer_names": list(group.layer_names),
            }
            for index, group in enumerate(value.groups)
        ],
        "parallel_shape": value.parallel_shape,
        "page_format": value.page_format,
        "extra": list(value.extra),
    }


# Sessions


def busiest(node: Node) -> list[LiveSession]:
    """At most MAX_ROWS, by loaded and stored bytes."""
    return heapq.nlargest(MAX_ROWS, node.sessions, lambda one: one.loaded_bytes + one.stored_bytes)


DOORS = {"hotkv-vllm": "own", "hotkv-offloading": "offloading"}
"""Doors by client name, as in docs/doors.md."""


def session_rows(node: Node, sessions: Iterable[LiveSession], now_s: float) -> list[Figures]:
    """In the order in which the sessions were opened."""
    held = inspect.leases_of_engines(node.core)
    more = node.offers.session_figures()
    rows = []
    for one in sorted(sessions, key=lambda one: one.record.number):
        # Once: another thread may set it to None.
        memory = one.memory
        row: Figures = {
            "session_number": one.record.number,
            "engine_id": one.record.engine_id,
            "engine_name": one.engine_name,
            "role": one.record.role,
            "tenant": one.key_space.tenant,
            "model": one.key_space.model,
            "model_name": one.model_name,
            "key_space_id": one.record.key_space_id,
            "client_name": one.client_name,
            "door": DOORS.get(one.client_name.partition(" ")[0], ""),
            "age_s": now_s - one.record.opened_s,
            "lease_count": held.get(one.record.engine_id, 0),
            "transfer_count": len(one.jobs),
            "memory_byte_count": memory.num_bytes if memory else 0,
            "device_allocation_count": len(memory.allocations) if memory else 0,
            "device_order": memory.order.kind.name.lower() if memory else "",
            "loaded_byte_count": one.loaded_bytes,
            "stored_byte_count": one.stored_bytes,
            "prefill_tokens_per_s": one.prefill_tokens_per_s,
        }
        for name, counts in more.items():
            row[name] = counts.get(one.record.number, 0)
        rows.append(row)
    return rows


# Blocks


async def _blocks(node: Node, filters: Filters) -> Figures:
    """A page of the blocks that match the filters, in no particular order."""
    token, number = filters.text("page_token"), filters.whole("key_space_id", MAX_KEY_SPACE_ID)
    if token and not (token.isascii() and token.isdecimal() and len(token) <= MAX_TOKEN_DIGITS):
        raise invalid("page_token is none that this server gave out; leave it empty to begin")
    size = min(filters.page_size(DEFAULT_BLOCKS, MAX_BLOCKS), SERVED_BLOCKS)
    if number:
        node.core.key_space(number)
    entries, breaks = list[int](), Breaks()
    finding = inspect.find_blocks(
        node.core, int(token or 0), size + 1, number, _prefix(filters.text("hash_prefix"))
    )
    for entries in finding:  # noqa: B007 - each part has what was found so far
        await breaks.between()
    now_s = time.monotonic()
    return {
        "blocks": [_block(node, one, now_s) for one in inspect.blocks(node.core, entries[:size])],
        "next_page_token": str(entries[size]) if len(entries) > size else "",
    }


async def _hot_blocks(node: Node, filters: Filters) -> Figures:
    """The blocks that would be evicted last, the hottest first."""
    size = min(filters.page_size(DEFAULT_BLOCKS, MAX_BLOCKS), SERVED_BLOCKS)
    number = filters.whole("key_space_id", MAX_KEY_SPACE_ID)
    if number:
        node.core.key_space(number)
    entries, breaks = list[int](), Breaks()
    for entries in inspect.hottest_blocks(node.core, size, number):  # noqa: B007 - the last counts
        await breaks.between()
    now_s = time.monotonic()
    return {"blocks": [_block(node, one, now_s) for one in inspect.blocks(node.core, entries)]}


def _prefix(digits: str) -> inspect.HashPrefix | None:
    """None without digits. Raises INVALID_FIELD."""
    try:
        return inspect.HashPrefix(digits) if digits else None
    except ValueError as error:
        raise invalid(f"hash_prefix is {digits[:80]!r}: {error}") from error


def _block(node: Node, block: inspect.BlockFigures, now_s: float) -> dict[str, Any]:
    key_space = node.core.key_space(block.key_space_id)

    def text(words: Words | None) -> str:
        return "" if words is None else words.tobytes()[: key_space.hash_bytes].hex()

    return {
        "block_hash": text(block.hash_words),
        "key_space_id": block.key_space_id,
        "model_name": node.names.model_of(key_space),
        "group_index": block.group_index,
        "state": inspect.STATES[block.state],
        "byte_count": block.slot_bytes,
        "depth": block.depth,
        "pin_count": block.num_pins,
        "idle_s": max(0.0, now_s - block.last_used_s) if block.last_used_s else 0.0,
        "parent_hash": text(block.parent_words),
        "sketch_byte_count": block.sketch_bytes,
    }


# ------------------------------------------------------------------------------------------ Devices


def device_figures(devices: Devices) -> Figures:
    """Figures of the GPUs, and of the part of the arena that they can access.

    why_none: why the server uses no GPU; empty if it uses one.
    registering_error: why the arena's registration stopped; empty while it runs and when
        complete.
    """
    pinner = devices.pinner
    return {
        "devices": [_device(devices, info, figures) for info, figures in devices.figures()],
        "why_none": devices.why_none,
        "registered_byte_count": devices.pinned_bytes,
        "registering_s": pinner.took_s if pinner is not None else 0.0,
        "registering_error": pinner.error if pinner is not None else "",
        "open_allocation_count": devices.num_open,
    }


def _device(devices: Devices, info: DeviceInfo, figures: CudaCopyFigures) -> Figures:
    engine = devices.engines[info.number]
    calibration, choices = engine.calibration, engine.choices()
    return {
        "number": info.number,
        "uuid": uuid_text(info.uuid),
        "name": info.name,
        "pci_bus_id": info.pci_bus_id,
        "numa_node": info.numa_node,
        "problem": figures.problem,
        "copies": [
            {
                "direction": moved.direction.value,
                "method": moved.method,
                "byte_count": moved.num_bytes,
                "piece_count": moved.num_pieces,
            }
            for moved in figures.moved
        ],
        "queued_piece_count": figures.num_queued,
        "flying_piece_count": figures.num_in_flight,
        "failed_job_count": figures.num_failed,
        "retried_job_count": figures.failures.num_retried,
        "demoted_methods": [
            {
                "direction": one.direction.value,
                "method": one.method.value,
                "replacement": one.replacement.value,
            }
            for one in figures.failures.demoted
        ],
        "speeds": [
            {
                "direction": direction.value,
                "method": method.value,
                "page_byte_count": page_bytes,
                "gb_per_s": speed,
                "is_chosen": choices.get((direction, page_bytes)) is method,
            }
            for (direction, method, page_bytes), speed in (
                calibration.speeds.items() if calibration is not None else ()
            )
        ],
    }
