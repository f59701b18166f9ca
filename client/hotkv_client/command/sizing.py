"""`hotkv size`: hit rate and saved time of arenas of given sizes.

`hotkv-server simulate` replays traces, or the requests that a live server's engines report from
now on. KV bytes of a token and prefill speed come from the server unless flags give them.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotkv_client.admin import AdminClient
from hotkv_client.command import failures, named_blocks, recorder
from hotkv_client.command.options import credentials_of
from hotkv_client.targets import admin_target
from hotkv_proto.errors import HotKVError

COMMAND = (sys.executable, "-m", "hotkv_server", "simulate")
MAX_BLOCKS = 20_000_000
RECORDED_TOKENS = 512
"""Tokens of a recorded block without `--block-tokens`; rounded up to whole blocks of the engine."""
PREFIX_CLOSED = ("full attention", "mla")
"""A hit needs every block of the prefix."""
SCALES = (0.25, 0.5, 1, 2, 4, 8)
"""Default sizes, as multiples of the live server's arena."""


class SizeError(RuntimeError):
    """The simulator is not installed, or nothing was recorded that it could replay."""


def size(
    connect: Callable[[], AdminClient], options: argparse.Namespace, say: Callable[[str], None]
) -> str:
    """Text, or JSON with `options.json`. Without a trace, first records for `options.seconds`.

    Raises HotKVError if the server refuses or does not answer, SizeError if the simulation can't
    run here, OSError if a trace can't be opened, ValueError if a needed value comes neither from
    flags nor from a server, or if the simulator fails.

    connect: called only if a value must come from the server.
    say: gets progress.
    """
    for path in options.traces:
        if not path.is_fifo():
            path.open().close()
    bytes_per_token, speed = options.bytes_per_token, options.prefill_tokens_per_s
    if options.traces and bytes_per_token:
        # Needs no server.
        return _simulated(options.traces, options, bytes_per_token, speed, options.arena)
    try:
        client = connect()
    except HotKVError as error:
        if options.traces:
            raise _unknown(error) from error
        raise
    with client:
        try:
            number, space = named_blocks.chosen_key_space(client, options.key_space)
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
            # After the recording, in which an engine may have measured it.
            speed = speed or prefill_tokens_per_s(client, number)
            return _simulated(traces, options, bytes_per_token, speed, arena, seconds)


def _unknown(error: HotKVError) -> ValueError:
    return ValueError(
        f"--bytes-per-token is not given, and no server tells it ({error.message}); give "
        "--bytes-per-token and --prefill-tokens-per-s, or --target"
    )


def token_bytes(space: dict[str, Any]) -> float:
    """KV bytes of one prompt token, summed over the groups that keep every token; of the first
    group if none does."""
    groups = space["groups"]
    whole = [group for group in groups if group["kind"] in PREFIX_CLOSED] or groups[:1]
    return float(
        sum(sum(group["shard_byte_counts"]) / group["block_token_count"] for group in whole)
    )


def prefill_tokens_per_s(client: AdminClient, key_space_id: int) -> float:
    """Highest that an engine has measured; 0 if none has."""
    speeds = (
        float(one["prefill_tokens_per_s"])
        for one in client.sessions()
        if one["key_space_id"] == key_space_id
    )
    return max(speeds, default=0.0)


def _sizes(client: AdminClient) -> str:
    """Default value of `--arena` for a live server."""
    # The tiers' report is too small while the arena is still being allocated.
    whole_bytes = client.info()["counters"]["arena_full_capacity_bytes"]
    return ",".join(str(int(whole_bytes * scale)) for scale in SCALES)


def _record(
    client: AdminClient,
    path: Path,
    number: int,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> float:
    """Returns the recorded seconds. Raises SizeError if no request arrived, or if all prompts
    are shorter than a block of the trace."""
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
    """Raises SizeError if the simulator is not installed, ValueError with its message if it fails.

    tokens_per_s: prefill speed; 0: unknown.
    arena: as `--arena`; empty: the simulator chooses.
    seconds: of the recording; 0: by the traces' time stamps.
    """
    command = [*COMMAND, "--arena", arena or "auto", "--bytes-per-token", repr(bytes_per_token)]
    command += ["--trace", *map(str, traces)]
    if tokens_per_s:
        command += ["--prefill-tokens-per-s", repr(tokens_per_s)]
    if seconds:
        command += ["--trace-seconds", repr(seconds)]
    if options.block_tokens:
        command += ["--block-tokens", str(options.block_tokens)]
    command += ["--json"] * options.json
    # A trace may be a pipe that the shell has named /dev/fd/N: descriptors stay open.
    done = subprocess.run(command, capture_output=True, text=True, close_fds=False)
    if done.returncode == 0:
        return done.stdout.rstrip("\n")
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    message = lines[-1].removeprefix("hotkv-server: ").removeprefix("hotkv-server simulate: ")
    if "No module named" in message:
        raise SizeError("the simulator is part of the server, which is not installed here")
    raise ValueError(message.replace("; hotkv-server simulate --help lists all", ""))


def main(options: argparse.Namespace) -> int:
    """Returns the command's exit status."""

    def connect() -> AdminClient:
        return AdminClient(options.target, options.timeout_s, credentials_of(options))

    def say(text: str) -> None:
        print(f"hotkv: {text}", file=sys.stderr)

    try:
        print(size(connect, options, say), flush=True)
    except HotKVError as error:
        return failures.refused(error, admin_target(options.target), as_json=options.json)
    except SizeError as error:
        return failures.failed(str(error), as_json=options.json)
    except KeyError as error:
        return failures.failed(failures.other_version(error), as_json=options.json)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return failures.wrong(error, as_json=options.json)
    return 0
