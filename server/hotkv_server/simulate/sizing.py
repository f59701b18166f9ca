"""Sizes in GiB and seconds: what an arena of a given size would hit of a trace's prompts, and save.

Always true: a prompt's hit counts whole blocks of its contiguous prefix, and never its last token,
which an engine always computes. What the engine's own device cache hit, as far as the trace says,
is not saved. The figures are an estimate: an engine's blocks are smaller than the trace's, and the
time to load is not subtracted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.simulate.replay import MakePolicy, Progress, replay, unbounded
from hotkv_server.simulate.trace import Int64s, Trace, TraceError

GIB = 1 << 30
BLOCK_SIZES = tuple(1 << power for power in range(3, 14))
"""Block sizes in tokens that are tried against a trace."""
AGREE_RATIO = 0.98
"""Share of requests that must agree with a block size."""
ENOUGH_RATIO = 0.95
"""An arena is enough if it hits this share of what an endless cache hits."""
DEFAULT_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Sizes without --arena, as shares of all different blocks."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to size for.

    arena_bytes: sizes to try; empty: shares of the trace's blocks.
    bytes_per_token: of a token in all layers.
    block_tokens: of a block of the trace; 0: as its lengths say.
    tokens_per_s: prefill speed of an engine; None if unknown.
    """

    arena_bytes: tuple[int, ...]
    bytes_per_token: float
    block_tokens: int = 0
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """What an arena of so many bytes hits and saves, in tokens of the whole trace."""

    arena_bytes: int
    hit_tokens: int
    saved_tokens: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """The sizes of a trace, rising. `endless`: a cache that never evicts, as large as it grows."""

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
        """Returns the seconds of prefill that an hour of such traffic saves; None without a speed
        or if all requests came at once."""
        if self.wanted.tokens_per_s is None or not self.trace_s:
            return None
        return one.saved_tokens / self.wanted.tokens_per_s * 3600 / self.trace_s

    @property
    def enough(self) -> Size:
        """Returns the smallest size that is enough; if none is, the largest."""
        goal = ENOUGH_RATIO * self.endless.hit_tokens
        return next((one for one in self.sizes if one.hit_tokens >= goal), self.sizes[-1])


def block_tokens_of(trace: Trace) -> int:
    """Returns the tokens of a block, by the prompts' lengths. Raises TraceError if they don't say
    it clearly."""
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
    """Replays the trace for each size. Raises TraceError if the tokens of a block are unknown."""
    block_tokens = wanted.block_tokens or block_tokens_of(trace)
    block_bytes = wanted.bytes_per_token * block_tokens
    arenas = wanted.arena_bytes or tuple(
        int(-(-share * trace.num_unique_blocks // 1) * block_bytes) for share in DEFAULT_SHARES
    )
    prompts = np.where(trace.prompt_tokens > 0, trace.prompt_tokens, trace.lengths * block_tokens)

    def counted(arena_bytes: int, prefix: Int64s) -> Size:
        served = trace.served(prefix) * block_tokens
        hits: NDArray[np.int64] = np.minimum(served, np.maximum(prompts - 1, 0))
        saved = np.maximum(hits - trace.device_hit_tokens, 0)
        return Size(arena_bytes, int(hits.sum()), int(saved.sum()))

    def replayed(arena_bytes: int) -> Size:
        capacity = min(int(arena_bytes / block_bytes), trace.num_unique_blocks)
        if not capacity:
            return Size(arena_bytes, 0, 0)
        return counted(arena_bytes, replay(trace, capacity, make_policy, progress).prefix)

    return Sizing(
        trace.name,
        Wanted(arenas, wanted.bytes_per_token, block_tokens, wanted.tokens_per_s),
        trace.num_requests + trace.num_short,
        float(trace.times_s[-1]),
        int(prompts.sum()) + trace.short_prompt_tokens,
        int(trace.device_hit_tokens.sum()),
        tuple(replayed(one) for one in sorted(arenas)),
        counted(int(trace.num_unique_blocks * block_bytes), unbounded(trace)),
    )


# ---------------------------------------------------------------------------------------- The words


def as_json(sizings: Sequence[Sizing]) -> str:
    """Returns a JSON object with a list `traces`."""
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
    """Returns for each trace a table and a sentence."""
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
    shown = [cells if speed else cells[:2] for cells in lines]
    widths = [max(len(cells[at]) for cells in shown) for at in range(len(shown[0]))]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for cells in shown
    ]
    return "\n".join([head, *table, "", sentence(one)])


def _cells(name: str, one: Sizing, size: Size) -> tuple[str, str, str]:
    saved_s = one.saved_s_per_hour(size)
    return name, f"{one.hit_ratio(size):.0%}", "-" if saved_s is None else _duration(saved_s)


def sentence(one: Sizing) -> str:
    """Returns what the size that is enough brings."""
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
