"""Estimates how many prompt tokens of a trace would hit in arenas of given sizes, and the prefill
that this saves.

Always true: hits on the device count as hits, not as saved. Only whole blocks before a prompt's
first miss hit, never its last token, which an engine always computes. A hit's lease pins at most
LEASED_SHARE of the arena; longer hits are cut. Estimates: an engine's blocks are smaller than
the trace's, and loads take time.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.command_line import columns
from hotkv_server.settings.storage import LeaseSettings
from hotkv_server.simulate.replay import MakePolicy, Progress, replay, unbounded
from hotkv_server.simulate.trace import Int64s, Trace, TraceError

GIB = 1 << 30
BLOCK_SIZES = tuple(1 << power for power in range(3, 14))
"""In tokens; tried by `block_tokens_of`."""
AGREE_RATIO = 0.98
"""Requests whose length in tokens must fit their number of blocks for a block size to be
accepted."""
ENOUGH_RATIO = 0.95
"""Share of the endless cache's hits with which an arena counts as large enough."""
LEASED_SHARE = float(LeaseSettings.model_fields["unadmitted_share"].default)
"""Of the arena, for one hit at default settings: what leases may pin before a load begins."""
DEFAULT_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of all different blocks: the sizes if none are given."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to estimate.

    arena_bytes: empty: DEFAULT_SHARES.
    bytes_per_token: in all layers.
    block_tokens: of the trace; 0: found from the prompts' lengths.
    tokens_per_s: prefill speed; None if unknown.
    seconds: of the recording; 0: from first to last request.
    """

    arena_bytes: tuple[int, ...]
    bytes_per_token: float
    block_tokens: int = 0
    tokens_per_s: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of the trace that hit in one arena.

    hit_tokens: on the device or in the arena.
    saved_tokens: of these, not on the device.
    """

    arena_bytes: int
    hit_tokens: int
    saved_tokens: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """The estimate for a trace.

    wanted: with the sizes and the block size that were used.
    trace_s: at least from first to last request.
    sizes: ascending.
    endless: of a cache that never evicts, with the size of all different blocks.
    """

    trace: str
    wanted: Wanted
    num_requests: int
    trace_s: float
    prompt_tokens: int
    device_hit_tokens: int
    sizes: tuple[Size, ...]
    endless: Size

    def hit_ratio(self, one: Size) -> float:
        return one.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def saved_s_per_hour(self, one: Size) -> float | None:
        """None if the speed is unknown, or the duration: all requests have one time and none was
        given."""
        if self.wanted.tokens_per_s is None or not self.trace_s:
            return None
        return one.saved_tokens / self.wanted.tokens_per_s * 3600 / self.trace_s

    @property
    def enough(self) -> Size:
        """Smallest size with ENOUGH_RATIO of the endless cache's hits, else the largest."""
        goal = ENOUGH_RATIO * self.endless.hit_tokens
        return next((one for one in self.sizes if one.hit_tokens >= goal), self.sizes[-1])


def block_tokens_of(trace: Trace) -> int:
    """Tokens of a block, from the prompts' lengths. Raises TraceError unless exactly one size
    fits."""
    known = trace.prompt_tokens > 0
    prompts, lengths = trace.prompt_tokens[known], trace.lengths[known]

    def agreeing(size: int) -> float:
        return float(((prompts // size <= lengths) & (lengths <= -(-prompts // size))).mean())

    found = [size for size in BLOCK_SIZES if known.any() and agreeing(size) >= AGREE_RATIO]
    if len(found) != 1:
        raise TraceError(
            f"{trace.name}: its input_length fields do not tell how many tokens a block has; give "
            "--block-tokens"
        )
    return found[0]


def size(
    trace: Trace, wanted: Wanted, make_policy: MakePolicy, progress: Progress | None = None
) -> Sizing:
    """Replays the trace for each size. Raises TraceError if the block size can't be found."""
    block_tokens = wanted.block_tokens or block_tokens_of(trace)
    block_bytes = wanted.bytes_per_token * block_tokens
    arenas = wanted.arena_bytes or tuple(
        # Up to whole bytes, or the last block would not fit.
        math.ceil(math.ceil(share * trace.num_unique_blocks) * block_bytes)
        for share in DEFAULT_SHARES
    )
    prompts = np.where(trace.prompt_tokens > 0, trace.prompt_tokens, trace.lengths * block_tokens)
    device_hits = int(trace.device_hit_tokens.sum()) + trace.short_device_hit_tokens

    def counted(arena_bytes: int, prefix: Int64s, leased_blocks: int) -> Size:
        served = trace.served(prefix) * block_tokens
        leased = trace.device_hit_tokens + leased_blocks * block_tokens
        most = np.minimum(np.maximum(prompts - 1, 0), leased)
        hits: NDArray[np.int64] = np.minimum(served, most)
        saved = int(np.maximum(hits - trace.device_hit_tokens, 0).sum())
        return Size(arena_bytes, device_hits + saved, saved)

    def replayed(arena_bytes: int) -> Size:
        capacity = min(int(arena_bytes / block_bytes), trace.num_unique_blocks)
        if not capacity:
            return Size(arena_bytes, device_hits, 0)
        leased_blocks = int(LEASED_SHARE * arena_bytes / block_bytes)
        done = replay(trace, capacity, make_policy, progress)
        return counted(arena_bytes, done.prefix, leased_blocks)

    return Sizing(
        trace.name,
        replace(wanted, arena_bytes=arenas, block_tokens=block_tokens),
        trace.num_requests + trace.num_short,
        max(trace.seconds, wanted.seconds),
        int(prompts.sum()) + trace.short_prompt_tokens,
        device_hits,
        tuple(replayed(one) for one in sorted(arenas)),
        counted(int(trace.num_unique_blocks * block_bytes), unbounded(trace), trace.num_accesses),
    )


# ---------------------------------------------------------------------------------------- The words


def as_json(sizings: Sequence[Sizing]) -> str:
    return json.dumps({"traces": [_fields(one) for one in sizings]}, indent=2)


def _fields(one: Sizing) -> dict[str, object]:
    def fields(size: Size) -> dict[str, object]:
        return {
            "arena_byte_count": size.arena_bytes,
            "hit_ratio": one.hit_ratio(size),
            "hit_token_count": size.hit_tokens,
            "saved_token_count": size.saved_tokens,
            "saved_s_per_hour": one.saved_s_per_hour(size),
        }

    return {
        "trace": one.trace,
        "request_count": one.num_requests,
        "seconds": one.trace_s,
        "prompt_token_count": one.prompt_tokens,
        "device_hit_token_count": one.device_hit_tokens,
        "block_token_count": one.wanted.block_tokens,
        "bytes_per_token": one.wanted.bytes_per_token,
        "prefill_tokens_per_s": one.wanted.tokens_per_s,
        "sizes": [fields(size) for size in one.sizes],
        "endless": fields(one.endless),
        "enough_byte_count": one.enough.arena_bytes,
    }


def as_text(sizings: Sequence[Sizing]) -> str:
    """A table and a sentence per trace."""
    return "\n\n".join(map(_text, sizings))


def _text(one: Sizing) -> str:
    speed = one.wanted.tokens_per_s
    head = (
        f"{one.trace}: {one.num_requests:,} requests in {_duration(one.trace_s)}, "
        f"{one.prompt_tokens:,} prompt tokens; {one.wanted.bytes_per_token / 1024:,.4g} KiB a token"
        + (f", prefill {speed:,.0f} tokens/s" if speed else "")
    )
    lines = [("arena", "prompt tokens hit", "prefill saved an hour")]
    lines += [_cells(f"{size.arena_bytes / GIB:,.1f} GiB", one, size) for size in one.sizes]
    lines.append(_cells(f"endless, {one.endless.arena_bytes / GIB:,.1f} GiB", one, one.endless))
    table = columns([cells if speed else cells[:2] for cells in lines])
    return "\n".join([head, table, "", sentence(one)])


def _cells(name: str, one: Sizing, size: Size) -> tuple[str, str, str]:
    saved_s = one.saved_s_per_hour(size)
    return name, f"{one.hit_ratio(size):.0%}", "-" if saved_s is None else _duration(saved_s)


def sentence(one: Sizing) -> str:
    """On the smallest arena that is large enough."""
    best = one.enough
    saved_s = one.saved_s_per_hour(best)
    saves = f", which saves about {_duration(saved_s)} of prefill an hour" if saved_s else ""
    text = (
        f"With {best.arena_bytes / GIB:,.1f} GiB {one.hit_ratio(best):.0%} of prompt tokens hit"
        f"{saves}; an endless cache hits {one.hit_ratio(one.endless):.0%}."
    )
    if one.device_hit_tokens:
        share = one.device_hit_tokens / max(1, one.prompt_tokens)
        text += f" {share:.0%} hit on the device already, which is not counted as saved."
    if one.wanted.tokens_per_s is None:
        text += " --prefill-tokens-per-s adds the seconds that this saves."
    return text


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
