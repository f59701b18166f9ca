"""The command line `hotkv`: asks a server about its blocks, hits and misses, and controls it.

Answers are tables by default, JSON with `--json`. The docstring of a command's function is its
help text, up to an empty line. What only some commands need is imported when they are called:
imports take most of a command's processor time.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import hotkv_proto
from hotkv_client.command import completion, failures, help_text, savings_tables, tables
from hotkv_client.command.help_text import CommandParser, JsonParser
from hotkv_client.command.options import (
    add_own_options,
    add_watch,
    common_options,
    credentials_of,
)
from hotkv_client.targets import admin_target
from hotkv_proto.command_line import bar, complete_words, ended, show_progress
from hotkv_proto.errors import HotKVError
from hotkv_proto.sparse_counters import SPARSE_COUNTERS, sparse_figures

if TYPE_CHECKING:
    from hotkv_client.admin import AdminClient

Command = Callable[["AdminClient", argparse.Namespace], Any]
LIVE = "live"
CLEAR = "\x1b[H\x1b[2J"
"""Empties a terminal."""
WATCHED = (
    "status", "savings", "sessions", "blocks", "hot", "devices", "residencies", "hints", "sparse",
    "slow",
)  # fmt: skip
"""Commands with `--watch`."""


def status(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Shows the state, tiers, key spaces and the hit rate."""
    return {
        **client.info(),
        "tiers": client.tiers(),
        "key_spaces": client.key_spaces(),
        "sessions": client.sessions(),
    }


def top(client: "AdminClient", options: argparse.Namespace) -> None:
    """Shows live rates: hits, tiers, engines, bytes moved, and problems."""
    from hotkv_client.command.top import live

    live.run(client, options.interval, options.count, as_json=options.json)


def devices(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Shows GPUs: bytes copied, the measured speed of each copy method, the part of the arena that
    is registered with CUDA."""
    answer: dict[str, Any] = client.info()["devices"]
    return answer


def ping(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Asks whether the server serves, for probes: exit status 0 if so, 1 if not."""
    return {"serving": client.ping(LIVE if options.live else "")}


def sessions(client: "AdminClient", options: argparse.Namespace) -> list[dict[str, Any]]:
    """Lists the live sessions."""
    return client.sessions()


def residencies(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Lists requests that pin their blocks in the arena while they run, and engines that wait for
    room."""
    return client.residencies()


def blocks(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Lists blocks, a page at a time."""
    return client.blocks(options.key_space, options.limit, options.page)


def hot(client: "AdminClient", options: argparse.Namespace) -> list[dict[str, Any]]:
    """Lists the hottest blocks, those that the server would evict last; the hottest first."""
    return client.hot_blocks(options.key_space, options.limit)


def evict(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Drops blocks that are not pinned."""
    from hotkv_client.command import named_blocks

    if options.all == bool(options.hashes):
        raise ValueError("give the hashes of blocks, or --all")
    if options.all and options.group is not None:
        raise ValueError("--group goes with hashes; --all drops the blocks of all groups")
    if options.all:
        total = client.evict(options.key_space, everything=True, dry_run=options.dry_run)
    else:
        # Stay 0 if no group can have a block with these hashes.
        counts = "evicted_block_count", "kept_block_count", "evicted_byte_count"
        total = dict.fromkeys(counts, 0)
        places = named_blocks.places(client, options.hashes, options.key_space, options.group)
        for (number, group), hashes in places.items():
            answer = client.evict(number, group, b"".join(hashes), dry_run=options.dry_run)
            total = {name: total.get(name, 0) + count for name, count in answer.items()}
    return {"dry_run": options.dry_run, **total}


def flush(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Drops all blocks of a key space, pinned blocks included."""
    return client.flush(options.key_space)


def events(client: "AdminClient", options: argparse.Namespace) -> None:
    """Prints blocks as they are stored and removed, until Ctrl-C."""
    shown = json.dumps if options.json else tables.event_line
    with contextlib.suppress(KeyboardInterrupt):
        read = client.events(options.key_space, options.seconds, tiers=True, state=options.state)
        for items, lost in read:
            for item in [*items, *([{"event": "lost", "count": lost}] if lost else [])]:
                print(shown(item), flush=True)


def record(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Writes a trace of the requests that engines report, until Ctrl-C. Numbers stand for the block
    hashes; the trace has no tokens."""
    from hotkv_client.command import recorder

    return recorder.record(
        client,
        options.file,
        options.key_space,
        options.block_tokens,
        options.seconds,
        options.max_blocks,
    )


def export(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Writes the hashes of the hottest blocks to a file, for `hotkv import` on another node."""
    from hotkv_client.command import named_blocks, warm_start

    number, _ = named_blocks.chosen_key_space(client, options.key_space)
    return warm_start.export(client, options.file, number, int(options.gib * (1 << 30)))


def import_(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Promotes the blocks named in a file of `hotkv export` from lower tiers to host memory."""
    from hotkv_client.command import warm_start

    return warm_start.fetch(client, options.file, options.wait)


def prefetch(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Promotes the blocks of prompts from lower tiers to host memory, before traffic comes."""
    from hotkv_client.command import named_blocks, warm_start

    space: dict[str, Any] | int
    if options.like is not None:
        with options.like.open(errors="replace") as file:
            space = warm_start.read_key_space(
                options.like, file.readline(warm_start.MAX_LINE_CHARS)
            )
    else:
        space, _ = named_blocks.chosen_key_space(client, options.key_space)
    return warm_start.fetch_prompts(client, options.prompts, space, options.wait)


def sparse(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Shows sparse decode by layer: hot-set hits, recall, attention mass, blocks, bytes swapped,
    time to select."""
    rows = client.sparse_layers()
    total = {name: sum(row[name] for row in rows) for name in SPARSE_COUNTERS}
    return {"layers": rows, "total": {**total, **sparse_figures(total)}}


def savings(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Shows what the cache has saved, by tenant, model or engine, and what a larger cache would
    save."""
    answer = client.savings(savings_tables.seconds(options.since))
    rows = savings_tables.grouped(answer["rows"], options.by)
    return {**answer, "by": options.by, "rows": rows, "total": savings_tables.total(rows)}


def drain(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Makes the server refuse new work, and stops it when all work has ended."""
    from hotkv_client.command import draining

    if not options.wait:
        return client.drain(options.grace_s)

    def say(progress: str, share: float) -> None:
        show_progress(share, progress)
        if not sys.stderr.isatty():
            print(f"hotkv: draining: {bar(share)}  {progress}", file=sys.stderr)

    answer = draining.drain(client, options.target, options.grace_s, say)
    show_progress()
    return answer


def resize(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Makes the arena larger or smaller while engines use it. At the next start the settings
    decide again."""
    return {"wanted_byte_count": options.size, **client.resize(options.size, options.grace_s)}


def hints(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Lists the hints of routers (such as hints to pin or prefetch blocks) with their outcomes and
    the time that they saved."""
    return client.hints(options.message, options.limit)


def explain(client: "AdminClient", options: argparse.Namespace) -> Any:
    """Says for each block of a prompt or a session whether it would hit, and if not, why."""
    from hotkv_client.command import named_blocks, prompts

    if sum(map(bool, (options.prompt, options.session, options.chat))) > 1:
        raise ValueError("give one of a prompt, --session and --chat")
    if bool(options.chat) != bool(options.engine):
        raise ValueError("--chat FILE and --engine URL: give both or neither")
    if options.session:
        sessions = client.explain_session(options.session)
        for one in sessions:
            one["key_spaces"] = [
                space
                for space in one["key_spaces"]
                if options.key_space in (0, space["key_space_id"])
            ]
        return {"sessions": sessions}
    hashes: list[str] = []
    if options.chat:
        from hotkv_client.command import chats

        token_ids = chats.tokenized(options.chat, options.engine, options.timeout_s)
    else:
        hashes, token_ids = prompts.parse_prompt(options.prompt)
    packed = named_blocks.whole_hashes(client, hashes, options.key_space) if hashes else b""
    return client.explain(options.key_space, packed, token_ids)


def show_explained(answer: Any) -> str:
    """A list if the user named a prompt, a dict for a session."""
    if isinstance(answer, dict):
        return tables.show_session(answer["sessions"])
    return tables.show_explain(answer)


def slow(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Shows which requests waited longest for the cache, and which transfers took longest, in the
    last hour, stage by stage."""
    return client.slow(options.limit)


def prove(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Says which blocks a request loaded, from where. With --engine and --body, the engine
    computes the answer again without them: equal, a tie, or different.

    Exit status 1 if it is different.
    """
    from hotkv_client.command import proving

    if bool(options.engine) != bool(options.body):
        raise ValueError("--engine URL and --body FILE: give both or neither")
    if not (options.request or options.body):
        return proving.listed(client, options.limit)
    answer: dict[str, Any] = {"request": None, "proof": None}
    if options.request:
        answer["request"] = proving.found(client, options.request)
    if options.body:
        answer["proof"] = proving.proved(client, options.engine, options.body, options.noise)
    return answer


def try_(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Sends a new prompt to an engine three times, and shows what was computed, what hit in the
    engine's own cache, and what hit in hotkv.

    Exit status 1 if nothing came from hotkv, or the answer differs.
    """
    from hotkv_client.command import trial

    def say(progress: str) -> None:
        print(f"hotkv: {progress}", file=sys.stderr)

    return trial.run(client, options.engine, options.second, options.tokens, say)


def show_tried(answer: dict[str, Any]) -> str:
    from hotkv_client.command import trial

    return trial.show(answer)


def show_proved(answer: dict[str, Any]) -> str:
    from hotkv_client.command import proving

    return proving.show(answer)


def config(client: "AdminClient", options: argparse.Namespace) -> dict[str, Any]:
    """Shows the settings that the server runs with, and where each comes from: default, file,
    environment or flag."""
    told = client.config()
    wanted = [name.lower() for name in options.names]
    rows = [
        row
        for row in told["settings"]
        if (not wanted or any(one in row["name"] for one in wanted))
        and (row["origin"] != "default" or not options.changed)
    ]
    if wanted and not rows:
        raise ValueError(f"no setting has {' or '.join(options.names)} in its name")
    return {**told, "settings": rows}


COMMANDS: dict[str, tuple[Command, Callable[[Any], str]]] = {
    "status": (status, tables.show_status),
    "top": (top, lambda answer: ""),
    "devices": (devices, tables.show_devices),
    "ping": (
        ping,
        lambda answer: "serving" if answer["serving"] else "not serving; `hotkv status` says why",
    ),
    "sessions": (sessions, tables.show_sessions),
    "residencies": (residencies, tables.show_residencies),
    "blocks": (blocks, tables.show_blocks),
    "hot": (hot, tables.block_rows),
    "evict": (evict, tables.show_evict),
    "flush": (flush, tables.show_flush),
    "events": (events, lambda answer: ""),
    "record": (record, tables.show_record),
    "export": (export, tables.show_export),
    "import": (import_, tables.show_fetched),
    "prefetch": (prefetch, tables.show_fetched),
    "savings": (savings, savings_tables.show_savings),
    "sparse": (sparse, tables.show_sparse),
    "resize": (resize, tables.show_resize),
    "drain": (drain, tables.show_drain),
    "hints": (hints, tables.show_hints),
    "slow": (slow, tables.show_slow),
    "config": (config, tables.show_config),
    "explain": (explain, show_explained),
    "try": (try_, show_tried),
    "prove": (prove, show_proved),
}


def parser(kind: type[CommandParser] = CommandParser) -> CommandParser:
    """kind: class of this parser and of each command's."""
    common = common_options(has_defaults=False)
    texts = {
        **{name: run.__doc__ or "" for name, (run, _) in COMMANDS.items()},
        **{name: run.__doc__ or "" for name, run in LOCAL_COMMANDS.items()},
    }
    helps = {name: " ".join(text.split("\n\n")[0].split()) for name, text in texts.items()}
    whole = kind(
        prog="hotkv",
        usage="hotkv [options] COMMAND [options]",
        description="Shows what a hotkv-server does, and changes what it holds.\n\n"
        + help_text.grouped(helps),
        epilog=help_text.EPILOG,
        formatter_class=help_text.GroupedHelp,
        parents=[common_options(has_defaults=True)],
    )
    whole.add_argument("--version", action="version", version=f"hotkv {hotkv_proto.__version__}")
    subparsers = whole.add_subparsers(dest="command", required=True, prog="hotkv")
    made = {
        name: subparsers.add_parser(
            name,
            parents=[common] if name != "completion" else [],
            help=text,
            description=text,
            epilog=f"example:\n  {help_text.EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, text in helps.items()
    }
    add_own_options(made)
    for name in WATCHED:
        add_watch(made[name])
    completion.add_values(made)
    return whole


def examine(options: argparse.Namespace) -> int:
    """Checks this host for problems with hotkv, and prints the commands that fix them.

    Needs no server. Exit status 1 if a finding is bad.
    """
    from hotkv_client.command import doctor

    return doctor.main(options)


def bench(options: argparse.Namespace) -> int:
    """Measures this host in a minute: memory, lookups, stores, loads, tiers. Starts a server for
    that.

    Exit status 1 if the benchmark can't run or a tier does not work; 128 plus its number after a
    signal.
    """
    from hotkv_client.command import host_bench

    return host_bench.main(options)


def size(options: argparse.Namespace) -> int:
    """Computes which share of prompt tokens would hit in an arena of a given size, and how much
    time that saves.

    Exit status 1 if the server refused or the simulator can't run, 2 for bad input.
    """
    from hotkv_client.command import sizing

    return sizing.main(options)


def complete(options: argparse.Namespace) -> int:
    """Prints a script that completes commands, flags and values in your shell, also of
    `hotkv-server`.

    Exit status 1 without argcomplete.
    """
    from hotkv_proto.extras import advice

    try:
        print(completion.script(options.shell), flush=True)
    except ImportError:
        return failures.failed(f"argcomplete is not installed: {advice('cli')}", as_json=False)
    return 0


LOCAL_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": examine,
    "bench": bench,
    "size": size,
    "completion": complete,
}
"""Need no running server, print their answers, and return the exit status."""


def _main(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    complete_words(parser)
    options = parser(JsonParser if "--json" in words else CommandParser).parse_args(words)
    if options.command in LOCAL_COMMANDS:
        return LOCAL_COMMANDS[options.command](options)
    if getattr(options, "watch", None) is not None:
        return _watch(options)
    return _ask(options)


def _watch(options: argparse.Namespace) -> int:
    """Until Ctrl-C, also while no server answers."""
    status, is_terminal = 0, sys.stdout.isatty()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if not options.json:
                at = time.strftime("%H:%M:%S")
                print(f"{CLEAR * is_terminal}{at}, every {options.watch:g} s, {options.target}\n")
            status = _ask(options)
            print(flush=True)
            time.sleep(options.watch)
    return status


def _ask(options: argparse.Namespace) -> int:
    if options.command == "status" and ("," in options.target or options.target.startswith("@")):
        from hotkv_client.command import fleet

        return fleet.main(options)
    from hotkv_client.admin import AdminClient

    run, show = COMMANDS[options.command]
    try:
        credentials = credentials_of(options)
        with AdminClient(options.target, options.timeout_s, credentials) as client:
            answer = run(client, options)
    except HotKVError as error:
        asked = options.target if options.command == "ping" else admin_target(options.target)
        return failures.refused(error, asked, as_json=options.json)
    except KeyError as error:
        return failures.failed(failures.other_version(error), as_json=options.json)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return failures.wrong(error, as_json=options.json)
    if answer is not None:
        try:
            text = json.dumps(answer, indent=2) if options.json else show(answer)
        except KeyError as error:
            return failures.failed(f"{failures.other_version(error)}; try --json", as_json=False)
        print(text)
    return 1 if is_bad(options.command, answer) else 0


def is_bad(command: str, answer: Any) -> bool:
    """For commands whose exit status is their answer."""
    if command == "ping":
        return not answer["serving"]
    if command == "try":
        return not answer["works"]
    return command == "prove" and (answer.get("proof") or {}).get("verdict") == "different"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: success, also if the reader of the output stops early, as `head` does. 1:
    the server refused or is absent. 2: bad input. 130: Ctrl-C."""
    return ended(lambda: _main(arguments))


if __name__ == "__main__":
    sys.exit(main())
