"""Notes what requests load, makes the rows for operators, and registers with the node."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.blocks import BlockResult, RunContent
from hotkv_proto.groups import needed_blocks
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.reports import CANCELS, LoadEnd
from hotkv_server.cache.values import HOST_TIER, Entries, Medium, Run
from hotkv_server.node.capability import Capability, Figures, Filters, Report, Topic
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.proof.book.latest import (
    CANCELLED,
    COMPUTED,
    FAILED,
    LOADED,
    LOADING,
    MAX_BLOCKS,
    MAX_REQUESTS,
    LoadedRequest,
    Requests,
)
from hotkv_server.proof.book.sources import BLOCK, RESTORED, STORED, UNKNOWN, Blocks, Sources
from hotkv_server.settings import Settings

DEFAULT_ROWS, MAX_ROWS = 20, 1000
WORDS = {UNKNOWN: "unknown", RESTORED: "restored", STORED: "stored"}


def attach(settings: Settings, node: Node) -> "ProofCapability":
    return ProofCapability(node)


class ProofCapability(Capability):
    def __init__(self, node: Node) -> None:
        self._core = node.core
        self._tiers = (HOST_TIER, *(node.tiers.names if node.tiers is not None else ()))
        self._began_unix_s = time.time()
        self._unnamed = itertools.count()
        self.sources = Sources(node.core.space.index.capacity)
        self.requests = Requests()
        node.events.blocks_stored.add(self._stored)
        node.events.blocks_moved.add(self._moved)
        node.events.request_scheduled.add(self._scheduled)
        node.events.load_ended.add(self._loaded)

    def __repr__(self) -> str:
        return f"ProofCapability({self.requests!r}, {self.sources!r})"

    def topics(self) -> Mapping[str, Topic]:
        return {"proof": Topic(self._tell, ("request_id", "page_size", "first_block"))}

    # Where blocks come from

    def _stored(
        self,
        session: LiveSession,
        runs: Sequence[Run],
        contents: Sequence[RunContent],
        results: Sequence[NDArray[np.uint8]],
    ) -> None:
        unix_s, key_space_id = int(time.time()), session.record.key_space_id
        for run, codes in zip(runs, results, strict=True):
            if run.group_index >= MAX_GROUPS:
                continue
            is_stored = codes == BlockResult.STORED
            if not is_stored.any():
                continue
            hashes = run.hashes if is_stored.all() else run.hashes[is_stored]
            words = self._core.space.index.find(key_space_id, run.group_index, hashes)
            self.sources.stored(words[table.is_ready(words)], session.engine_name, unix_s)

    def _moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        if medium is Medium.CPU:
            tiers = self._core.space.origins[entries]
            self.sources.promoted(entries, tiers, int(time.time()))

    # What requests load

    def _scheduled(self, session: LiveSession, report: Report) -> None:
        parts = list(self._parts(session, report))
        outcome = COMPUTED
        if report.hit_tokens > report.device_hit_tokens:
            outcome = LOADING if report.report_id else LOADED
        request = LoadedRequest(
            report.request_id,
            session.engine_name,
            session.model_name,
            session.record.key_space_id,
            report.prompt_tokens,
            report.device_hit_tokens,
            report.hit_tokens,
            outcome,
            time.monotonic(),
            np.concatenate(parts) if parts else np.zeros(0, BLOCK),
        )
        self.requests.begin((session.secret_id, report.report_id or -next(self._unnamed)), request)

    def _parts(self, session: LiveSession, report: Report) -> Iterator[Blocks]:
        """Of each group the blocks between the hit on the device and the whole hit. The load's
        lease pins them until it has ended, so most are found."""
        if report.hit_tokens <= report.device_hit_tokens:
            return
        space, index = session.key_space, self._core.space.index
        needs = needed_blocks(space.groups, report.hit_tokens)
        for at, (group, needed) in enumerate(zip(space.groups, needs, strict=True)):
            step = group.block_tokens // space.hash_block_tokens
            first = max(needed.start, report.device_hit_tokens // group.block_tokens)
            hashes = np.ascontiguousarray(report.hashes[step - 1 :: step][first : needed.stop])
            if not len(hashes):
                continue
            words = index.find(session.record.key_space_id, at, hashes)
            is_known = table.is_ready(words)
            entries = np.where(is_known, words, np.uint32(0))
            blocks = np.zeros(len(hashes), BLOCK)
            self.sources.tell(entries, blocks)
            blocks["check"] = index.checks(entries)
            blocks[~is_known] = np.array([(0, 0, 0, 0, 0, 0, UNKNOWN)], BLOCK)
            blocks["hash"] = hashes.view(np.uint64)[:, 0]
            blocks["position"] = np.arange(first, first + len(hashes))
            blocks["group"] = at
            yield blocks

    def _loaded(self, session: LiveSession, load: LoadEnd) -> None:
        outcome = LOADED
        if load.failed:
            outcome = CANCELLED if load.miss in CANCELS or not load.wait_s else FAILED
        self.requests.end((session.secret_id, load.report_id), outcome)

    # For operators

    def _tell(self, filters: Filters) -> Figures:
        now_s, text = time.monotonic(), filters.text("request_id")
        most = filters.page_size(DEFAULT_ROWS, MAX_ROWS)
        first = filters.whole("first_block", MAX_BLOCKS)
        found = self.requests.named(text) if text else list(self.requests.latest())
        rows = [_row(one, now_s) for one in found[:most]]
        if text and len(found) == 1:
            rows[0]["blocks"] = list(map(self._block, found[0].blocks[first : first + most]))
        return {
            "requests": rows,
            "request_count": len(found),
            "most_count": MAX_REQUESTS,
            "began_unix_time_ms": int(self._began_unix_s * 1000),
        }

    def _block(self, block: np.void) -> Figures:
        origin, check = int(block["origin"]), int(block["check"])
        return {
            "group_index": int(block["group"]),
            "position": int(block["position"]),
            "hash_prefix": block["hash"].tobytes().hex(),
            "checksum": f"{check:016x}" if check else "",
            "origin": WORDS.get(origin, "promoted"),
            "tier": "" if origin == UNKNOWN else self._tiers[max(origin, 0)],
            "engine_name": self.sources.engine(int(block["engine"])),
            "unix_time_ms": int(block["unix_s"]) * 1000,
        }


def _row(one: LoadedRequest, now_s: float) -> Figures:
    return {
        "request_id": one.request_id,
        "engine_name": one.engine_name,
        "model_name": one.model_name,
        "key_space_id": one.key_space_id,
        "age_s": max(0.0, now_s - one.reported_s),
        "prompt_token_count": one.prompt_tokens,
        "device_hit_token_count": one.device_hit_tokens,
        "hit_token_count": one.hit_tokens,
        "outcome": one.outcome,
        "block_count": len(one.blocks),
        "omitted_block_count": one.num_omitted,
    }
