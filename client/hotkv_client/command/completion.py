"""Completion of the words of `hotkv` in a shell, by argcomplete: commands and flags as the command
line's parser has them, values (key spaces, hashes, sessions) from a server, if one answers within
WAIT_S."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotkv_client.command.options import credentials_of
from hotkv_client.targets import DEFAULT_TARGET
from hotkv_proto.command_line import counted
from hotkv_proto.errors import HotKVError

if TYPE_CHECKING:
    from hotkv_client.admin import AdminClient

WAIT_S = 2.0
MAX_VALUES = 50
PROGRAMS = ("hotkv", "hotkv-server")

Listed = Iterator[tuple[str, str]]
"""Values with descriptions."""


def key_spaces(client: "AdminClient", word: str) -> Listed:
    for one in client.key_spaces():
        yield (
            str(one["key_space_id"]),
            f"{one['model_name']}, {counted(one['block_count'], 'block')}",
        )


def sessions(client: "AdminClient", word: str) -> Listed:
    outcomes = client.hints(page_size=MAX_VALUES)["outcomes"]
    for name in dict.fromkeys(one["session_id"] for one in outcomes if one["session_id"]):
        yield name, "session of a router"


def hashes(client: "AdminClient", word: str) -> Listed:
    for one in client.blocks(0, MAX_VALUES, hash_prefix=word)["blocks"]:
        yield one["block_hash"][: max(16, len(word))], f"{one['model_name']}, block {one['depth']}"


def messages(client: "AdminClient", word: str) -> Listed:
    for one in client.hints(page_size=MAX_VALUES)["outcomes"]:
        if one["message_id"]:
            yield one["message_id"], f"{one['action_type'] or 'action'}, {one['status']}"


def settings(client: "AdminClient", word: str) -> Listed:
    for one in client.config()["settings"]:
        yield one["name"], one["origin"]


OF_FLAGS = {"--key-space": key_spaces, "--session": sessions, "--message": messages}
OF_WORDS = {"evict": hashes, "explain": hashes, "config": settings}
"""Commands whose positional arguments are values of a server."""
SUGGESTED = {"--since": ("10m", "1h", "24h", "7d"), "--target": (DEFAULT_TARGET,)}
"""Values of flags that take others too."""


def add_values(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """made: parsers by the name of the command."""

    def asked(listed: Callable[["AdminClient", str], Listed]) -> Callable[..., dict[str, str]]:
        def ask(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
            from hotkv_client.admin import AdminClient

            try:
                credentials = credentials_of(parsed_args)
                with AdminClient(parsed_args.target, WAIT_S, credentials) as client:
                    return dict(listed(client, prefix))
            except (HotKVError, ValueError, OSError):
                return {}

        return ask

    for name, parser in made.items():
        for action in parser._actions:
            of_word = OF_WORDS.get(name) if not action.option_strings else None
            listed = of_word or next(filter(None, map(OF_FLAGS.get, action.option_strings)), None)
            if (words := suggested(action.option_strings)) is not None:
                action.completer = words  # type: ignore[attr-defined]
            if listed is not None:
                # argcomplete looks for this attribute.
                action.completer = asked(listed)  # type: ignore[attr-defined]


def suggested(flags: Sequence[str]) -> Callable[..., tuple[str, ...]] | None:
    words = next(filter(None, map(SUGGESTED.get, flags)), None)
    return None if words is None else lambda **_: words


def script(shell: str) -> str:
    """For the shell to read. Raises ImportError without argcomplete.

    shell: `bash`, `zsh` or `fish`.
    """
    from argcomplete.shell_integration import shellcode

    # Without the shell's own completion, which would offer files where a number is wanted.
    return shellcode(list(PROGRAMS), use_defaults=False, shell=shell)
