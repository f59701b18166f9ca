"""The command `hotkv-server`. What one subcommand needs is imported for it only."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hotkv_proto
from hotkv_proto import extras, native
from hotkv_proto.command_line import (
    INTERRUPTED,
    Parser,
    complete_words,
    ended,
    open_streams,
    show_progress,
)
from hotkv_server import logs

USAGE_ERROR = 2
ALL = ("arenas", "simulate", "settings")
SHARED_KERNELS = ("hotkv_proto.table_reading", "hotkv_sparse.all_kernels")


def kernels() -> list[str]:
    """All installed modules with kernels that a server loads; in the server's own packages, those
    called `…_kernels`."""
    top = Path(__file__).parent
    own = sorted(file.relative_to(top.parent) for file in top.rglob("*_kernels.py"))
    shared = [name for name in SHARED_KERNELS if find_spec(name.partition(".")[0])]
    return [*shared, *(".".join(file.with_suffix("").parts) for file in own)]


def main(arguments: Sequence[str] | None = None) -> int:
    """`arguments`: None for those of the process.

    Exit status: 1 if the server could not start or a check failed; 2 for bad settings or input;
    130 after Ctrl-C. A broken invariant exits with 70 without a return.
    """
    open_streams()
    complete_words(lambda: parser_of_all(ALL))
    words = sys.argv[1:] if arguments is None else arguments
    parser = parser_of_all(tuple(words))
    known, flags = parser.parse_known_args(arguments)
    if known.command != "arenas" and not native.available():
        logs.print_fatal(native.why_unavailable(), _log_format(known, flags))
        return 1
    if flags and known.command not in ("run", "tiers"):
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if known.command == "run" and not (known.check or known.help_settings):
        # Not by `ended`, which treats a broken pipe as a normal end: a server prints nothing, so
        # it would be a defect.
        try:
            return _run(known, flags)
        except KeyboardInterrupt:
            return INTERRUPTED
    runs = {
        "run": lambda: _run(known, flags),
        "tiers": lambda: _check_tiers(known, flags),
        "compile": _compile,
        "arenas": lambda: _list_arenas(known),
        "simulate": lambda: _simulate(known),
    }
    return ended(runs[known.command])


def parser_of_all(words: Sequence[str] = ()) -> Parser:
    """words: subcommands whose own flags are needed; ALL: also a flag for each setting, as
    completion needs them."""
    parser = Parser(prog="hotkv-server", description="KV cache server for vLLM.")
    parser.add_argument(
        "--version", action="version", version=f"hotkv-server {hotkv_proto.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run the server",
        epilog="Every other flag is a setting: `hotkv-server run --help-settings` lists them.",
    )
    run.add_argument("--config", type=Path, help="TOML file with settings")
    run.add_argument(
        "--check",
        action="store_true",
        help="check all that can keep a server from starting, print the settings as JSON, and exit",
    )
    run.add_argument(
        "--reset",
        action="store_true",
        help="start with an empty cache, whatever an earlier server has left",
    )
    run.add_argument("--help-settings", action="store_true", help="list all settings and exit")
    commands.add_parser(
        "compile",
        help="compile the kernels, so that the first start need not; NUMBA_CACHE_DIR says where to",
    )
    left = commands.add_parser(
        "arenas",
        help="list arenas in shared memory, and give back the memory of those whose server is gone",
    )
    if "arenas" in words:
        from hotkv_server import arenas

        arenas.add_arguments(left)
    tiers = commands.add_parser("tiers", help="try the tiers of the settings, without a server")
    check = tiers.add_subparsers(dest="action", required=True).add_parser(
        "check",
        help="write, read, compare and remove some blocks in each tier",
        epilog="Every other flag is a setting, as of `hotkv-server run`.",
    )
    check.add_argument("--config", type=Path, help="TOML file with settings")
    check.add_argument("--json", action="store_true", help="print JSON")
    simulate = commands.add_parser("simulate", help="say what a cache would have hit in a trace")
    if "simulate" in words:
        from hotkv_server.simulate import command as simulation

        simulation.add_arguments(simulate)
    if words == ALL:
        from hotkv_server.settings import Settings, sources

        for name, info in sources.leaves(Settings):
            for one in (run, check):
                one.add_argument(
                    sources.flag_of(name), help=info.description, **sources.values_of(info)
                )
    return parser


def _list_arenas(options: argparse.Namespace) -> int:
    from hotkv_server import arenas

    return arenas.run(options)


def _simulate(options: argparse.Namespace) -> int:
    from hotkv_server.simulate import command as simulation

    return simulation.run(options)


def _compile() -> int:
    """Takes minutes."""
    names = kernels()
    for at, name in enumerate(names):
        show_progress(at / len(names), name)
        native.require(name)
    show_progress()
    if native.is_temporary():
        print(f"hotkv-server: {native.NO_DIRECTORY}", file=sys.stderr)
        return 1
    return 0


def _check_tiers(options: argparse.Namespace, flags: list[str]) -> int:
    try:
        from hotkv_server.tiers import check as tier_check
    except ImportError as missing:
        return _say_missing(missing)
    return tier_check.run(options, flags)


def _log_format(options: argparse.Namespace, flags: list[str]) -> str:
    """Of the lines that say why the server does not start."""
    is_start = options.command == "run" and not (options.check or options.help_settings)
    return logs.asked_format(flags, options.config) if is_start else "text"


def _say_missing(missing: ImportError, form: str = "text") -> int:
    why = f"{missing.name} is not installed: {extras.advice('server')}"
    logs.print_fatal(why, form)
    return 1


def _run(options: argparse.Namespace, flags: list[str]) -> int:
    try:
        from hotkv_server.settings import Settings, load_settings, sources
    except ImportError as missing:
        return _say_missing(missing, _log_format(options, flags))
    if options.help_settings:
        print(sources.listing(Settings))
        return 0

    def load() -> Settings:
        return load_settings(options.config, flags, "hotkv-server run")

    try:
        settings = load()
    except ValueError as error:
        logs.print_fatal(str(error), _log_format(options, flags))
        return USAGE_ERROR
    if options.check:
        from hotkv_server.startup.preflight import become_owner, check_and_clean

        print(settings.model_dump_json(indent=2, by_alias=True))
        become_owner(settings)
        problems, notes = check_and_clean(settings)
        logs.print_fatal("\n".join([*problems, *(f"note: {note}" for note in notes)]))
        return 1 if problems else 0
    import asyncio
    from importlib.metadata import version

    # Lets the thread of gRPC's events also read the sockets, so that each message wakes one
    # thread less. This halves the processor time of gRPC's threads, measured with gRPC 1.85;
    # 1.71 needs more. gRPC reads the variable when it is loaded.
    if tuple(map(int, version("grpcio").split(".")[:2])) >= (1, 85):
        os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    logs.set_up(settings.log_level, settings.log_format)
    from hotkv_server.startup import StartError, process
    from hotkv_server.startup.progress import Progress

    progress = Progress()
    try:
        # Before the event loop, which needs descriptors and threads itself.
        process.check_limits(settings)
        progress.begin("loading the program")
        progress.watch_compiler()
        from hotkv_server.daemon import serve

        runs: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
        with contextlib.suppress(ImportError):
            import uvloop

            runs = uvloop.run
        runs(serve(settings, progress, reset=options.reset, load=load))
    except StartError as error:
        logs.print_fatal(str(error), settings.log_format)
        return 1
    finally:
        progress.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
