"""Records a trace of engines' requests, a JSON object per line, in the format of Mooncake's traces.

- `timestamp`: ms since the recording began.
- `input_length`: tokens of the prompt.
- `output_length`: 0, unknown.
- `hash_ids`: a number per whole block of the prompt, counted up in the order of first appearance;
  equal numbers mean equal prefixes.
- `device_hit_length`: tokens that hit in the engine's device cache; not of Mooncake.
- `hit_length`: tokens that hit there or in hotkv; not of Mooncake.

No tokens, no hashes. A trace covers one key space, because the numbers do not name it.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from hotkv_client.admin import AdminClient
from hotkv_client.command.named_blocks import chosen_key_space
from hotkv_client.wire.admin import WatchedRequest


class TraceWriter:
    """Formats the requests of a key space.

    hash_block_tokens: for which the engine computes one hash.
    block_tokens: of the trace's blocks; rounded up to a multiple of `hash_block_tokens`.
    start_unix_s: by the server's clock; `record` corrects it as it learns more about that clock.
    """

    def __init__(
        self, hash_bytes: int, hash_block_tokens: int, block_tokens: int, start_unix_s: float
    ) -> None:
        hashes_per_block = max(1, -(-block_tokens // hash_block_tokens))
        self.block_tokens = hashes_per_block * hash_block_tokens
        self.num_requests = 0
        self.num_blocks = 0
        self._hash_bytes = hash_bytes
        self._step_bytes = hashes_per_block * hash_bytes
        self.start_unix_s = start_unix_s
        self._last_ms = 0
        self._ids: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"TraceWriter({self.num_requests} requests, {len(self._ids)} different blocks)"

    @property
    def num_unique_blocks(self) -> int:
        return len(self._ids)

    def line(self, request: WatchedRequest) -> str:
        """The request as a line of the trace, without newline. Timestamps never decrease: a
        request that is reported late gets the previous line's."""
        ends = range(self._step_bytes, len(request.hashes) + 1, self._step_bytes)
        # A hash covers all tokens up to its end: the last one within a block stands for it and
        # all before it.
        hashes = (request.hashes[end - self._hash_bytes : end] for end in ends)
        hash_ids = [self._ids.setdefault(block_hash, len(self._ids)) for block_hash in hashes]
        self._last_ms = max(self._last_ms, int((request.unix_time_s - self.start_unix_s) * 1000))
        self.num_requests += 1
        self.num_blocks += len(hash_ids)
        fields = {
            "timestamp": self._last_ms,
            "input_length": request.prompt_tokens,
            "output_length": 0,
            "hash_ids": hash_ids,
            "device_hit_length": request.device_hit_tokens,
            "hit_length": request.hit_tokens,
        }
        return json.dumps(fields, separators=(",", ":"))


def record(
    client: AdminClient,
    path: Path,
    key_space_id: int,
    block_tokens: int,
    seconds: float,
    max_blocks: int,
) -> dict[str, Any]:
    """Writes each request as it arrives, and returns a summary. Stops after `seconds` (0: never),
    at Ctrl-C, or after `max_blocks` different blocks. Raises HotKVError if the server refuses or
    the stream fails, OSError if the file can't be written, ValueError if `block_tokens` is not
    positive.

    key_space_id: 0: the server's only one.
    """
    if block_tokens <= 0:
        raise ValueError(f"--block-tokens is {block_tokens}; it must be positive")
    number, space = chosen_key_space(client, key_space_id)
    began_s, lost = time.monotonic(), 0
    tracer = TraceWriter(
        space["hash_byte_count"], space["hash_block_token_count"], block_tokens, -math.inf
    )
    with path.open("w", buffering=1) as file:
        try:
            for requests, missed in client.watch_requests(number, seconds):
                lost += missed
                # The server's clock may differ from ours. It shows at least the newest request's
                # time.
                now_unix_s = max((request.unix_time_s for request in requests), default=-math.inf)
                start_unix_s = now_unix_s - (time.monotonic() - began_s)
                tracer.start_unix_s = max(tracer.start_unix_s, start_unix_s)
                file.writelines(tracer.line(request) + "\n" for request in requests)
                if tracer.num_unique_blocks >= max_blocks:
                    break
        except KeyboardInterrupt:
            pass
    return {
        "file": str(path),
        "key_space_id": number,
        "block_token_count": tracer.block_tokens,
        "request_count": tracer.num_requests,
        "block_count": tracer.num_blocks,
        "unique_block_count": tracer.num_unique_blocks,
        "lost_request_count": lost,
        "is_full": tracer.num_unique_blocks >= max_blocks,
        "seconds": time.monotonic() - began_s,
    }
