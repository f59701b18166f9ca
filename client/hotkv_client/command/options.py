"""The options of `hotkv` and of each command."""

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotkv_client.command import savings_tables
from hotkv_client.command.help_text import CommandParser
from hotkv_client.targets import DEFAULT_TARGET, Credentials

TIMEOUT_S = 10.0
INTERVAL_S = 2.0
MAX_SECONDS, MAX_WAIT_S, MAX_GIB, MAX_ID = 1e7, 60.0, 1e9, (1 << 31) - 1
"""The server would refuse larger numbers, or they would not fit into messages."""
MIN_SECONDS = 0.001
"""Where the server would replace 0 by its default."""
MAX_SLOW = 64
NOISE = 0.25
"""Of logprobs: two steps of bfloat16 for logits between 16 and 32."""
RESIZE_GRACE_S = 30.0
TRY_TOKENS = 6000
BENCH_SECONDS, BENCH_ARENA_MIB = 30.0, 512
SHELLS = ("bash", "zsh", "fish")
CREDENTIAL_FLAGS = {
    "tls_ca": "over TCP: PEM file of who signs the server's certificate",
    "tls_certificate": "over TCP: PEM file of this client's certificate",
    "tls_key": "over TCP: PEM file of its key",
    "tls_server_name": (
        "over TCP: name in the server's certificate, if it is not the host of --target"
    ),
    "token_file": "over TCP: file with an admin's token",
}


def common_options(*, has_defaults: bool) -> CommandParser:
    """Options of all commands, which may stand before or after the command.

    has_defaults: False for the parsers of commands, whose defaults would override options before
        the command.
    """

    def default(value: Any) -> Any:
        return value if has_defaults else argparse.SUPPRESS

    common = CommandParser(add_help=False)
    # An empty HOTKV_TARGET counts as not set, as in the connector.
    target = os.environ.get("HOTKV_TARGET") or DEFAULT_TARGET
    common.add_argument(
        "--target",
        type=_target,
        default=default(target),
        help=f"server (default: $HOTKV_TARGET or {target}); for status also A,B,C or @FILE",
    )
    for field, text in CREDENTIAL_FLAGS.items():
        common.add_argument(
            f"--{field.replace('_', '-')}",
            default=default(""),
            metavar="NAME" if field == "tls_server_name" else "FILE",
            help=text,
        )
    common.add_argument(
        "--timeout-s",
        type=_number(0.001, MAX_SECONDS, "seconds"),
        default=default(TIMEOUT_S),
        help=f"longest wait for an answer (default: {TIMEOUT_S:g})",
    )
    common.add_argument(
        "--json", action="store_true", default=default(False), help="print the answer as JSON"
    )
    return common


def add_own_options(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Adds each command's own options to its parser.

    made: parsers by the name of the command.
    """
    for name in ("blocks", "hot", "evict", "explain", "events"):
        made[name].add_argument(
            "--key-space",
            type=_whole(0, MAX_ID),
            default=0,
            help="number of the key space (default: all)",
        )
    made["top"].add_argument(
        "--interval",
        type=float,
        default=INTERVAL_S,
        metavar="SECONDS",
        help="time between two readings (default: %(default)g)",
    )
    made["top"].add_argument(
        "--count",
        type=int,
        default=0,
        help="print so many readings as text, then end (default: a screen until q, or into a pipe "
        "text until Ctrl-C)",
    )
    made["flush"].add_argument(
        "--key-space", type=_whole(0, MAX_ID), required=True, help="number of the key space"
    )
    made["record"].add_argument("file", type=Path, help="file to write, in Mooncake's format")
    _add_size_options(made["size"])
    made["export"].add_argument("file", type=Path, help="file to write")
    made["export"].add_argument(
        "--gib",
        type=_number(0, MAX_GIB, "GiB"),
        default=0,
        help="so many GiB of the hottest blocks (default: all)",
    )
    made["import"].add_argument("file", type=Path, help="file of `hotkv export`")
    made["prefetch"].add_argument(
        "--prompts", type=Path, required=True, help="file with a JSON list of token ids a line"
    )
    made["prefetch"].add_argument(
        "--like", type=Path, help="file of `hotkv export` that has the key space"
    )
    for name in ("import", "prefetch"):
        made[name].add_argument(
            "--wait",
            type=_number(MIN_SECONDS, MAX_WAIT_S, "seconds"),
            default=30,
            help="longest wait for each 2,000 blocks, in seconds (default: %(default)s)",
        )
    for name in ("record", "export", "prefetch", "size"):
        made[name].add_argument(
            "--key-space",
            type=_whole(0, MAX_ID),
            default=0,
            help="number of the key space (default: the only one)",
        )
    made["record"].add_argument(
        "--block-tokens",
        type=int,
        default=512,
        help="tokens in a block of the trace (default: %(default)s)",
    )
    made["record"].add_argument(
        "--max-blocks",
        type=_whole(1, MAX_ID),
        default=20_000_000,
        help="stop after so many different blocks (default: %(default)s)",
    )
    for name in ("events", "record"):
        made[name].add_argument(
            "--seconds",
            type=_number(0, MAX_SECONDS, "seconds"),
            default=0,
            help="stop after this time (default: at Ctrl-C)",
        )
    made["events"].add_argument(
        "--state",
        action="store_true",
        help="begin with the blocks that are cached, as far as the server knows their tokens",
    )
    for name, limit, most in (("blocks", 50, 10_000), ("hot", 20, 2_000)):
        made[name].add_argument(
            "--limit",
            type=_whole(1, most),
            default=limit,
            help="most blocks to list (default: %(default)s)",
        )
    made["blocks"].add_argument("--page", default="", help="continue a listing")
    made["savings"].add_argument(
        "--by",
        choices=savings_tables.GROUPS,
        default="model",
        help="what a row is (default: %(default)s)",
    )
    made["savings"].add_argument(
        "--since",
        default="",
        metavar="TIME",
        help="only the last 90s, 30m, 1h or 7d (default: all)",
    )
    made["evict"].add_argument(
        "hashes", nargs="*", help="block hashes in hexadecimal, or their first digits"
    )
    made["evict"].add_argument(
        "--group", type=_whole(0, MAX_ID), default=None, help="group of the hashes (default: all)"
    )
    made["evict"].add_argument(
        "--dry-run", action="store_true", help="drop nothing; show what would go"
    )
    made["evict"].add_argument(
        "--all", action="store_true", help="drop everything in the key space, or in all"
    )
    made["ping"].add_argument(
        "--live", action="store_true", help="whether it is in order, also while it drains"
    )
    made["drain"].add_argument(
        "--grace-s",
        type=_number(MIN_SECONDS, MAX_SECONDS, "seconds"),
        default=0,
        metavar="SECONDS",
        help="longest wait for work in flight (default: the server's drain_timeout_s)",
    )
    made["resize"].add_argument("size", type=_byte_count, help="such as 96GiB")
    made["resize"].add_argument(
        "--grace-s",
        type=_number(MIN_SECONDS, MAX_SECONDS, "seconds"),
        default=RESIZE_GRACE_S,
        metavar="SECONDS",
        help="longest wait for blocks that are pinned where the arena ends (default: %(default)g)",
    )
    made["drain"].add_argument(
        "--wait", action="store_true", help="return when the server has ended"
    )
    made["explain"].add_argument(
        "prompt",
        nargs="*",
        help="token ids, block hashes in hexadecimal (their first digits suffice) or the answer of "
        "vLLM's /tokenize; @FILE or - (standard input) has either",
    )
    made["explain"].add_argument(
        "--chat",
        type=Path,
        metavar="FILE",
        help="a chat: messages or a request in JSON, or text; --engine tokenises it",
    )
    made["explain"].add_argument(
        "--engine", default="", metavar="URL", help="a vLLM such as http://127.0.0.1:8000"
    )
    made["explain"].add_argument(
        "--session", default="", metavar="ID", help="a session, as its router has named it"
    )
    made["try"].add_argument(
        "--engine",
        required=True,
        metavar="URL",
        help="a vLLM with hotkv, such as "
        "http://127.0.0.1:8000; it must run with VLLM_SERVER_DEV_MODE=1, unless --second is given",
    )
    made["try"].add_argument(
        "--second", default="", metavar="URL", help="another engine of the same model on this node"
    )
    made["try"].add_argument(
        "--tokens",
        type=_whole(64, 1_000_000),
        default=TRY_TOKENS,
        help="most tokens of the prompt, if the model takes as many (default: %(default)s)",
    )
    made["prove"].add_argument(
        "request",
        nargs="?",
        default="",
        metavar="REQUEST",
        help="the answer's id, or its first characters (default: lists the last requests)",
    )
    made["prove"].add_argument(
        "--engine", default="", metavar="URL", help="a vLLM that computes the answer twice"
    )
    made["prove"].add_argument(
        "--body",
        type=Path,
        metavar="FILE",
        help="the request's body in JSON, as it was sent to the engine",
    )
    made["prove"].add_argument(
        "--noise",
        type=float,
        default=NOISE,
        help="difference of logprobs that is none (default: %(default)s, for bfloat16)",
    )
    made["prove"].add_argument(
        "--limit",
        type=_whole(1, 1_000),
        default=20,
        help="most requests to list without an id (default: %(default)s)",
    )
    made["slow"].add_argument(
        "--limit",
        type=_whole(1, MAX_SLOW),
        default=10,
        help="most requests, and most transfers, to list (default: %(default)s)",
    )
    made["config"].add_argument(
        "names", nargs="*", metavar="NAME", help="only settings with this in their name"
    )
    made["config"].add_argument(
        "--changed", action="store_true", help="only settings that are not defaults"
    )
    made["hints"].add_argument("--message", default="", metavar="ID", help="only of this message")
    made["hints"].add_argument(
        "--limit",
        type=_whole(1, 1_000),
        default=50,
        help="most hints to list (default: %(default)s)",
    )

    made["doctor"].add_argument("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    made["completion"].add_argument("shell", choices=SHELLS)
    add_bench_options(made["bench"])


def _add_size_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `hotkv size`."""
    made.add_argument(
        "traces",
        type=Path,
        nargs="*",
        metavar="TRACE",
        help="traces, as of `hotkv record` (default: what engines report from now on)",
    )
    made.add_argument(
        "--seconds",
        type=_number(0.1, MAX_SECONDS, "seconds"),
        default=600,
        help="how long to record without a trace (default: %(default)g)",
    )
    made.add_argument(
        "--arena",
        default="",
        metavar="SIZE[,SIZE...]",
        help="sizes to try, such as 20GiB,40GiB (default: around the server's, or what fits the "
        "trace)",
    )
    made.add_argument(
        "--bytes-per-token",
        type=_positive,
        default=0.0,
        metavar="N",
        help="bytes of a token in all layers (default: the server's key space tells)",
    )
    made.add_argument(
        "--prefill-tokens-per-s",
        type=_positive,
        default=0.0,
        metavar="N",
        help="how fast an engine prefills (default: as the server's engines have measured)",
    )
    made.add_argument(
        "--block-tokens",
        type=_whole(1, MAX_ID),
        default=0,
        metavar="N",
        help="tokens of a block of the trace (default: as its lengths say; without a trace: 512)",
    )


def _byte_count(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]i?B|B)?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 96GiB or 1.5TiB")
    unit = (found[2] or "B").removesuffix("B")
    base = 1024 if unit.endswith("i") else 1000
    return int(float(found[1]) * base ** " KMGT".index(unit[:1] or " "))


def add_watch(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--watch",
        nargs="?",
        type=_number(0.1, MAX_WAIT_S * 60, "seconds"),
        const=INTERVAL_S,
        metavar="SECONDS",
        help=f"show it again and again, until Ctrl-C (every {INTERVAL_S:g} s, or as given)",
    )


def credentials_of(options: argparse.Namespace) -> Credentials:
    return Credentials(**{field: getattr(options, field) for field in CREDENTIAL_FLAGS})


def _target(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names no server; give unix:/PATH or HOST:PORT")
    return text


def _positive(text: str) -> float:
    found = _parsed(text)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return found


def _number(least: float, most: float, unit: str) -> Callable[[str], float]:
    """Parses a number in this range. Rejects `inf` and `nan`, which would fail in a call."""

    def number(text: str) -> float:
        found = _parsed(text)
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: give {least:g} to {most:,.0f} {unit}")
        return found

    return number


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        found = _parsed(text)
        if not least <= found <= most or found % 1:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, {least} to {most:,}")
        return int(found)

    return whole


def _parsed(text: str) -> float:
    """`nan` if the text is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_bench_options(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--seconds",
        type=float,
        default=BENCH_SECONDS,
        help="for all measures; start, stop and tiers come on top (default: %(default)g)",
    )
    made.add_argument(
        "--arena-mib",
        type=int,
        default=BENCH_ARENA_MIB,
        help="memory that the benchmark's server takes meanwhile (default: %(default)s)",
    )
    made.add_argument("--disk", type=Path, help="folder in which a disk tier is tried")
    made.add_argument("--config", type=Path, help="settings of a server, whose tiers are tried")
