"""Estimates for arenas of given sizes how many prompt tokens of a trace would hit, and how many
seconds of prefill that would save.

Always true: tokens that hit in the engine's own device cache (if the trace contains their number)
count as hits, but not as saved. In the arena only whole blocks before a prompt's first miss hit,
and never the prompt's last token, which an engine always computes. A hit's lease pins at most
LEASED_SHARE of the arena, so a longer hit is cut. The figures are estimates: an engine's blocks are
smaller than the trace's blocks, and the time to load blocks is not subtracted.
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
"""Block sizes, in tokens, that `block_tokens_of` tries if the trace's block size is not given."""
AGREE_RATIO = 0.98
"""A block size is accepted only if, in at least this share of requests, the prompt's length in
tokens fits the number of blocks that the trace lists."""
ENOUGH_RATIO = 0.95
"""An arena counts as large enough if at least this share of the tokens hits that would hit in a
cache that never evicts."""
LEASED_SHARE = float(LeaseSettings.model_fields["unadmitted_share"].default)
"""Largest share of the arena that the blocks of one hit can take, with the server's default
settings: the share that leases may pin while no load has begun under them."""
DEFAULT_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Arena sizes to simulate if no sizes are given, as shares of all different blocks of the trace."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The input of an estimate.

    arena_bytes: sizes of arenas to simulate; empty: DEFAULT_SHARES of the trace's blocks.
    bytes_per_token: bytes of a token's KV in all layers.
    block_tokens: tokens of a block of the trace; 0: find it from the lengths of prompts.
    tokens_per_s: prefill speed of an engine; None if unknown.
    seconds: duration of the recording; 0: the time from the first to the last request of the trace.
    """

    arena_bytes: tuple[int, ...]
    bytes_per_token: float
    block_tokens: int = 0
    tokens_per_s: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Size:
    """The result for an arena of `arena_bytes`.

    hit_tokens: prompt tokens of the whole trace that hit on the engine's device or in the arena.
    saved_tokens: those hit tokens that did not already hit on the device.
    """

    arena_bytes: int
    hit_tokens: int
    saved_tokens: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """The estimate for a trace.

    wanted: the input, with the sizes and the block size that were used.
    trace_s: duration of the recording; at least the time from the first to the last request.
    sizes: results, by ascending size.
    endless: result of a cache that never evicts; its size is the size of all different blocks.
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
        """Returns the seconds of prefill that the hits of the result `one` save per hour of the
        trace's traffic. Returns None if the engine's prefill speed is unknown. Also returns None if
        the duration of the recording is unknown: all requests have the same time, and the caller
        gave no duration."""
        if self.wanted.tokens_per_s is None or not self.trace_s:
            return None
        return one.saved_tokens / self.wanted.tokens_per_s * 3600 / self.trace_s

    @property
    def enough(self) -> Size:
        """Returns the result for the smallest size whose hit tokens are at least ENOUGH_RATIO of
        the hit tokens of a cache that never evicts. If no size suffices, returns the result for the
        largest size."""
        goal = ENOUGH_RATIO * self.endless.hit_tokens
        return next((one for one in self.sizes if one.hit_tokens >= goal), self.sizes[-1])


def block_tokens_of(trace: Trace) -> int:
    """Finds the number of tokens of a block, from the prompts' lengths and their numbers of blocks.
    Raises TraceError unless exactly one block size fits."""
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
    """Replays the trace for each size and returns the estimate. Raises TraceError if the number of
    tokens of a block can't be found.

    make_policy: makes an eviction policy for entry numbers from 1 to the given capacity.
    progress: called from time to time with the number of requests replayed since its last call.
    """
    block_tokens = wanted.block_tokens or block_tokens_of(trace)
    block_bytes = wanted.bytes_per_token * block_tokens
    arenas = wanted.arena_bytes or tuple(
        # Rounds up to whole bytes: with fewer bytes, the last block would not fit.
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
    """Returns a JSON object whose list `traces` has an object for each estimate."""
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
    """Formats a table and a summary sentence for each trace."""
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
    """Returns a sentence about the smallest arena that is large enough: how many tokens hit in it
    and how much time it saves."""
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
