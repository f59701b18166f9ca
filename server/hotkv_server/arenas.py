"""The command `hotkv-server arenas`: lists arenas in shared memory, and removes those that no
server uses."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from hotkv_proto.command_line import columns
from hotkv_server.memory.arena import BusyError
from hotkv_server.memory.left_behind import SHARED_MEMORY, ArenaLeft, find, remove

USAGE_ERROR = 2
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        type=Path,
        default=SHARED_MEMORY,
        help="where to look, two levels deep (default: %(default)s)",
    )
    parser.add_argument(
        "--remove",
        action="append",
        default=[],
        metavar="NAME",
        help="remove this arena; again for more of them",
    )
    parser.add_argument(
        "--remove-stale",
        action="store_true",
        help=(
            "remove this user's arenas on which no server runs, also of those that are only "
            "stopped and would go on with them"
        ),
    )
    parser.add_argument(
        "--all-users", action="store_true", help="with --remove-stale: other users' arenas too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Exit status: 1 if an arena could not be removed, 2 for an unknown name or a missing
    folder."""
    if not os.path.isdir(options.folder):
        print(f"hotkv-server: --folder: there is no folder {options.folder}", file=sys.stderr)
        return USAGE_ERROR
    found = find(options.folder)
    unknown = sorted(set(options.remove) - {arena.name for arena in found})
    if unknown:
        print(
            f"hotkv-server: --remove: {options.folder} has no arena {', '.join(unknown)}; "
            "without flags all are listed",
            file=sys.stderr,
        )
        return USAGE_ERROR
    stale = [arena for arena in found if arena.is_stale] if options.remove_stale else []
    mine = [arena for arena in stale if options.all_users or arena.uid == os.geteuid()]
    chosen = [arena for arena in found if arena.name in options.remove or arena in mine]
    if not (options.remove or options.remove_stale):
        show(found, as_json=options.json)
        return 0
    removed: list[tuple[str, int]] = []
    status = 0
    for arena in chosen:
        try:
            removed.append((arena.name, remove(arena)))
        except (BusyError, OSError) as error:
            print(f"hotkv-server: not removed: {printable(str(error))}", file=sys.stderr)
            status = 1
    if others := sorted({arena.uid for arena in stale if arena not in chosen}):
        print(
            f"hotkv-server: not removed: arenas of user ids {', '.join(map(str, others))}; "
            "--all-users removes them too",
            file=sys.stderr,
        )
    if options.json:
        print(
            json.dumps(
                {"removed": [{"name": name, "num_bytes": num_bytes} for name, num_bytes in removed]}
            )
        )
    else:
        for name, num_bytes in removed:
            mib = f"{num_bytes / MIB:.0f} MiB"
            print(f"removed {printable(name)}: {mib}, free once no engine maps them")
        if not removed and not status:
            print("nothing to remove")
    return status


def show(found: list[ArenaLeft], *, as_json: bool) -> None:
    if as_json:
        rows = [
            {**asdict(arena), "path": str(arena.path), "is_stale": arena.is_stale}
            for arena in found
        ]
        print(json.dumps({"arenas": rows}))
        return
    if not found:
        print("no arenas")
        return
    lines = [("name", "memory", "arena", "server", "runtime_dir", "version")]
    for arena in found:
        memory, size = (
            f"{num_bytes / MIB:.0f} MiB" for num_bytes in (arena.num_bytes, arena.arena_bytes)
        )
        lines.append(
            (
                arena.name,
                memory,
                size,
                server_of(arena),
                arena.runtime_dir or "?",
                arena.version or "?",
            )
        )
    print(columns([[printable(cell) for cell in line] for line in lines], range(len(lines[0]))))


def server_of(arena: ArenaLeft) -> str:
    """Whether a server uses the arena; else how long ago its files last changed."""
    if arena.is_running is None:
        return f"unknown, user id {arena.uid}"
    if arena.is_running:
        return f"running, pid {arena.pid or '?'}"
    days, hours, minutes = (
        int(arena.idle_s // 86400),
        int(arena.idle_s // 3600 % 24),
        int(arena.idle_s // 60 % 60),
    )
    return "gone for " + (f"{days}d {hours}h" if days else f"{hours}h {minutes}m")


def printable(text: str) -> str:
    """Other users may have chosen the names of arenas."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
