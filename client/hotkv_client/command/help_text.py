"""The text of `hotkv --help`: commands grouped by purpose, with examples."""

import argparse
import textwrap
from collections.abc import Mapping
from typing import NoReturn

from hotkv_client.command.failures import usage_failure
from hotkv_proto.command_line import Parser

WIDTH = 80
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Look at a server": (
        "status", "top", "savings", "sessions", "blocks", "hot", "devices", "residencies",
        "slow", "hints", "sparse", "events", "config", "ping",
    ),
    "Try it": ("try",),
    "Ask why": ("explain", "prove", "doctor"),
    "Find the right size": ("size", "record", "bench"),
    "Change what is cached": ("evict", "flush", "resize", "export", "import", "prefetch"),
    "Stop it": ("drain",),
    "Your shell": ("completion",),
}  # fmt: skip
"""In the order of help."""
EXAMPLES: Mapping[str, str] = {
    "status": "hotkv status --target unix:/run/hotkv/grpc.sock",
    "top": "hotkv top --count 1",
    "savings": "hotkv savings --by engine --since 1h",
    "sessions": "hotkv sessions",
    "blocks": "hotkv blocks --limit 20",
    "hot": "hotkv hot --limit 10",
    "devices": "hotkv devices",
    "residencies": "hotkv residencies",
    "hints": "hotkv hints --limit 10",
    "sparse": "hotkv sparse",
    "events": "hotkv events --seconds 10",
    "slow": "hotkv slow --limit 5",
    "config": "hotkv config --changed",
    "ping": "hotkv ping --live",
    "explain": "hotkv explain --chat chat.json --engine http://127.0.0.1:8000",
    "try": "hotkv try --engine http://127.0.0.1:8000",
    "prove": "hotkv prove chatcmpl-9f3a --engine http://127.0.0.1:8000 --body request.json",
    "doctor": "hotkv doctor",
    "size": "hotkv size trace.jsonl --arena 20GiB,40GiB --bytes-per-token 131072",
    "record": "hotkv record trace.jsonl --seconds 3600",
    "bench": "hotkv bench --seconds 10",
    "evict": "hotkv evict 4fd2a1 --dry-run",
    "flush": "hotkv flush --key-space 1",
    "export": "hotkv export hot.jsonl --gib 20",
    "import": "hotkv import hot.jsonl",
    "prefetch": "hotkv prefetch --prompts prompts.jsonl",
    "resize": "hotkv resize 96GiB",
    "drain": "hotkv drain --wait",
    "completion": "hotkv completion bash > ~/.local/share/bash-completion/completions/hotkv",
}
EPILOG = "hotkv COMMAND --help shows a command's options and an example."


class CommandParser(Parser):
    """as_json: errors are written as JSON."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        if not self.as_json:
            super().error(message)
        self.exit(2, f"{usage_failure(self.meant(message))}\n")


class JsonParser(CommandParser):
    as_json = True


class GroupedHelp(argparse.RawDescriptionHelpFormatter):
    """Without argparse's own list of commands, which `grouped` replaces."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WIDTH)

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action, argparse._SubParsersAction):
            super().add_argument(action)


def grouped(helps: Mapping[str, str]) -> str:
    """helps: help text by command."""
    parts = []
    indent = " " * (4 + max(map(len, helps)))
    for title, names in GROUPS.items():
        lines = [
            textwrap.fill(
                helps[name],
                WIDTH,
                initial_indent=f"  {name}".ljust(len(indent)),
                subsequent_indent=indent,
            )
            for name in names
        ]
        parts.append("\n".join([f"{title}:", *lines, f"  $ {EXAMPLES[names[0]]}"]))
    return "\n\n".join(parts)
