"""`hotkv size`: computes the hit rate and the saved time of arenas of given sizes.

The traffic is a trace (a file of recorded requests), or the requests that the engines of a live
server report from now on. `hotkv-server simulate` replays the traffic. The KV bytes of a token and
the prefill speed come from the server unless flags give them.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotkv_client.admin import AdminClient
from hotkv_client.command import recorder
from hotkv_proto.errors import HotKVError

COMMAND = (sys.executable, "-m", "hotkv_server", "simulate")
MAX_BLOCKS = 20_000_000
RECORDED_TOKENS = 512
"""Tokens of a block in a recorded trace, unless `--block-tokens` gives them. The recorder rounds up
to whole blocks of the engine."""
PREFIX_CLOSED = ("full attention", "mla")
"""Kinds of groups in which a hit needs every block of the prefix."""
SCALES = (0.25, 0.5, 1, 2, 4, 8)
"""Default arena sizes to simulate, as multiples of the live server's arena."""


class SizeError(RuntimeError):
    """The simulation can't run here; the message says why."""


def size(
    connect: Callable[[], AdminClient], options: argparse.Namespace, say: Callable[[str], None]
) -> str:
    """Simulates the arenas and returns the result as text, or as JSON with `options.json`. Without
    a trace (file of recorded requests), first records requests for `options.seconds`.

    Raises HotKVError if the server refuses or does not answer, SizeError if the simulation can't
    run here, and OSError if a trace can't be opened. Raises ValueError if a needed value comes
    neither from flags nor from a server, or if the simulator fails.

    connect: connects to the server; called only if a value must come from it.
    say: called with a text about the progress.
    """
    for path in options.traces:
        if not path.is_fifo():
            path.open().close()
    bytes_per_token, speed = options.bytes_per_token, options.prefill_tokens_per_s
    if options.traces and bytes_per_token:
        # The flags give every value, so no server is needed.
        return _simulated(options.traces, options, bytes_per_token, speed, options.arena)
    try:
        client = connect()
    except HotKVError as error:
        if options.traces:
            raise _unknown(error) from error
        raise
    with client:
        try:
            number, space = recorder.chosen_key_space(client, options.key_space)
        except HotKVError as error:
            if options.traces:
                raise _unknown(error) from error
            raise
        bytes_per_token = bytes_per_token or token_bytes(space)
        arena = options.arena or _sizes(client)
        traces = options.traces
        seconds = 0.0
        with tempfile.TemporaryDirectory(prefix="hotkv-size-") as folder:
            if not traces:
                traces = [Path(folder) / "this traffic"]
                seconds = _record(client, traces[0], number, options, say)
            # Asks for the prefill speed after the recording, because an engine may have measured
            # its speed during the recording.
            speed = speed or prefill_tokens_per_s(client, number)
            return _simulated(traces, options, bytes_per_token, speed, arena, seconds)


def _unknown(error: HotKVError) -> ValueError:
    return ValueError(
        f"--bytes-per-token is not given, and no server tells it ({error.message}); give "
        "--bytes-per-token and --prefill-tokens-per-s, or --target"
    )


def token_bytes(space: dict[str, Any]) -> float:
    """Returns the KV bytes of a token of a prompt.

    Adds up the groups that keep every token (full attention and MLA). If there is no such group,
    uses the first group.
    """
    groups = space["groups"]
    whole = [group for group in groups if group["kind"] in PREFIX_CLOSED] or groups[:1]
    return float(
        sum(sum(group["shard_byte_counts"]) / group["block_token_count"] for group in whole)
    )


def prefill_tokens_per_s(client: AdminClient, key_space_id: int) -> float:
    """Returns the highest prefill speed that an engine of a key space (a model in a
    configuration) has measured; 0 if no engine has measured its speed."""
    speeds = (
        float(one["prefill_tokens_per_s"])
        for one in client.sessions()
        if one["key_space_id"] == key_space_id
    )
    return max(speeds, default=0.0)


def _sizes(client: AdminClient) -> str:
    """Returns the arena sizes that are simulated by default for a live server, as the value of
    `--arena`."""
    # Scales the arena's full size. The capacity in the report about tiers would be too small while
    # the arena is still being allocated.
    whole_bytes = client.info()["counters"]["arena_full_capacity_bytes"]
    return ",".join(str(int(whole_bytes * scale)) for scale in SCALES)


def _record(
    client: AdminClient,
    path: Path,
    number: int,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> float:
    """Records the requests of a key space (a model in a configuration) in a trace at `path`.
    Returns for how many seconds it recorded. Raises SizeError if no request arrived, or if all
    prompts are shorter than a block of the trace.

    number: id of the key space; 0: the server's only key space.
    """
    say(f"recording requests for {options.seconds:g} s; Ctrl-C ends it sooner")
    block_tokens = options.block_tokens or RECORDED_TOKENS
    done = recorder.record(client, path, number, block_tokens, options.seconds, MAX_BLOCKS)
    if not done["request_count"]:
        raise SizeError(
            f"no engine has reported a request in {done['seconds']:.0f} s; record for longer with "
            "--seconds"
        )
    if not done["block_count"]:
        raise SizeError(
            f"all {done['request_count']} prompts are shorter than {done['block_token_count']} "
            "tokens; record smaller blocks with --block-tokens"
        )
    options.block_tokens = done["block_token_count"]
    return float(done["seconds"])


def _simulated(
    traces: Sequence[Path],
    options: argparse.Namespace,
    bytes_per_token: float,
    tokens_per_s: float,
    arena: str,
    seconds: float = 0.0,
) -> str:
    """Runs the simulator and returns its output. Raises SizeError if the simulator is not
    installed, and ValueError with the simulator's message if it fails.

    bytes_per_token: KV bytes of a token of a prompt.
    tokens_per_s: prefill speed of an engine; 0: unknown.
    arena: the arena sizes, as the value of `--arena`; empty: the simulator chooses them.
    seconds: duration of the recording; 0: the simulator uses the time stamps of the traces.
    """
    command = [*COMMAND, "--arena", arena or "auto", "--bytes-per-token", repr(bytes_per_token)]
    command += ["--trace", *map(str, traces)]
    if tokens_per_s:
        command += ["--prefill-tokens-per-s", repr(tokens_per_s)]
    if seconds:
        command += ["--trace-seconds", repr(seconds)]
    if options.block_tokens:
        command += ["--block-tokens", str(options.block_tokens)]
    if options.policy:
        command += ["--policy", options.policy]
    command += ["--json"] * options.json
    # Leaves file descriptors open (`close_fds=False`), because a trace may be a pipe that the shell
    # has named /dev/fd/N.
    done = subprocess.run(command, capture_output=True, text=True, close_fds=False)
    if done.returncode == 0:
        return done.stdout.rstrip("\n")
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    message = lines[-1].removeprefix("hotkv-server: ").removeprefix("hotkv-server simulate: ")
    if "No module named" in message:
        raise SizeError("the simulator is part of the server, which is not installed here")
    raise ValueError(message.replace("; hotkv-server simulate --help lists all", ""))
