"""Shell completion: `hotkv completion SHELL` prints a script made from the command line's parser.

It contains all commands and flags. Values of a live server (key spaces, hashes, sessions) come
from the hidden command `hotkv __values`, which prints none if no server answers within WAIT_S.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hotkv_client.admin import AdminClient
from hotkv_client.command.options import CREDENTIAL_FLAGS, common_options
from hotkv_client.types import Credentials
from hotkv_proto.errors import HotKVError

WAIT_S = 2.0
MAX_VALUES = 50
VALUES = "__values"
"""The hidden command."""
KEY_SPACE, SESSION, HASH = "key-space", "session", "hash"
OF_FLAGS = {"--key-space": KEY_SPACE, "--session": SESSION}
OF_WORDS = {"evict": HASH, "explain": HASH}
"""Commands whose positional arguments are values of a live server."""

BASH = """\
_hotkv() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case ${{COMP_WORDS[i]}} in
      {commands}) command=${{COMP_WORDS[i]}}; break ;;
    esac
  done
  case $before in
{values}
  esac
  case $command in
    "") COMPREPLY=($(compgen -W "{words} {flags}" -- "$word")) ;;
{cases}
  esac
  case $command/$word in
{hashes}
  esac
}}
_hotkv_values() {{
  local value
  while IFS=$'\\t' read -r value _; do
    [[ $value == "$word"* ]] && COMPREPLY+=("$(printf %q "$value")")
  done < <(hotkv {program} "$1" "$word" "${{COMP_WORDS[@]:1}}" 2>/dev/null)
}}
complete -o default -F _hotkv hotkv
"""
"""Clients choose sessions' names, which may contain shell commands. So values are quoted, and
not passed to `compgen -W`, which would run them."""
ZSH_HEAD = "autoload -U +X bashcompinit && bashcompinit\n"


def script(top: argparse.ArgumentParser, shell: str) -> str:
    """Made for `source <(hotkv completion bash)` or `hotkv completion fish | source`.

    shell: `bash`, `zsh` or `fish`.
    """
    if shell == "fish":
        return "\n".join(_fish(top)) + "\n"
    parsers = _parsers(top)
    made = BASH.format(
        commands="|".join(parsers),
        words=" ".join(parsers),
        flags=" ".join(_words(top)),
        program=VALUES,
        values="\n".join(
            f"    {flag}) _hotkv_values {kind}; return ;;" for flag, kind in OF_FLAGS.items()
        ),
        hashes="\n".join(
            f"    {name}/-*) ;;\n    {name}/*) _hotkv_values {kind} ;;"
            for name, kind in OF_WORDS.items()
        ),
        cases="\n".join(
            f'    {name}) COMPREPLY=($(compgen -W "{" ".join(_words(parser))}" -- "$word")) ;;'
            for name, parser in parsers.items()
        ),
    )
    return (ZSH_HEAD if shell == "zsh" else "") + made


def _parsers(top: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (found,) = (one for one in top._actions if isinstance(one, argparse._SubParsersAction))
    return dict(found.choices)


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Long flags, and choices of positional arguments."""
    for action in _shown(parser):
        yield from (flag for flag in action.option_strings if flag.startswith("--"))
        if not action.option_strings:
            yield from map(str, action.choices or ())


def _shown(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        is_commands = isinstance(action, argparse._SubParsersAction)
        if not is_commands and action.help != argparse.SUPPRESS:
            yield action


def _fish(top: argparse.ArgumentParser) -> Iterator[str]:
    """Yields lines with a description of each command and flag."""
    first = "not __fish_seen_subcommand_from " + " ".join(_parsers(top))
    # -f: no file names, except as the value of a flag that takes a file.
    yield "complete -c hotkv -f"
    for name, parser in _parsers(top).items():
        yield f"complete -c hotkv -n '{first}' -a {name} -d {_quoted(parser.description or '')}"
        yield from _fish_flags(parser, f"__fish_seen_subcommand_from {name}")
        if kind := OF_WORDS.get(name):
            yield f"complete -c hotkv -n '__fish_seen_subcommand_from {name}' -a {_asked(kind)}"
    yield from _fish_flags(top, first)


def _fish_flags(parser: argparse.ArgumentParser, when: str) -> Iterator[str]:
    for action in _shown(parser):
        text = " ".join(str(action.help or "").split()).replace("%(default)s", str(action.default))
        flag = next((one for one in action.option_strings if one.startswith("--")), "")
        line = f"complete -c hotkv -n '{when}'"
        if not flag:
            if action.choices:
                yield f"{line} -a '{' '.join(map(str, action.choices))}'"
            elif action.metavar in ("FILE", "TRACE") or action.dest in ("file", "traces"):
                yield f"{line} -F"
            continue
        line += f" -l {flag.removeprefix('--')} -d {_quoted(text.partition(' (default')[0])}"
        if kind := OF_FLAGS.get(flag):
            line += f" -x -a {_asked(kind)}"
        elif action.choices:
            line += f" -x -a '{' '.join(map(str, action.choices))}'"
        elif action.nargs != 0:
            line += " -r -F" if action.metavar == "FILE" or action.type is Path else " -x"
        yield line


def _asked(kind: str) -> str:
    return f"'(hotkv {VALUES} {kind} (commandline -ct) (commandline -opc)[2..] 2>/dev/null)'"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# Values of a live server


def values(words: Sequence[str]) -> Iterator[str]:
    """Lines `VALUE<tab>DESCRIPTION`; none if no server answers.

    words: kind of value (`key-space`, `session` or `hash`), beginning of the word to complete,
        then all words of the command line, in which flags may name the server.
    """
    kind, word, *typed = [*words, "", ""]
    # bash splits words at these characters: `--target unix : /run/hotkv/grpc.sock`.
    line = re.sub(r"\0([:=]+)\0", r"\1", "\0".join(filter(None, typed)))
    common, _ = common_options(has_defaults=True).parse_known_args(line.split("\0"))
    listed = _LISTED.get(kind)
    if listed is None:
        return
    credentials = Credentials(**{field: getattr(common, field) for field in CREDENTIAL_FLAGS})
    try:
        with AdminClient(common.target, WAIT_S, credentials) as client:
            yield from (f"{value}\t{text}" for value, text in listed(client, word))
    except (HotKVError, ValueError, OSError):
        return


Listed = Iterator[tuple[str, str]]


def _key_spaces(client: AdminClient, word: str) -> Listed:
    for one in client.key_spaces():
        yield str(one["key_space_id"]), f"{one['model_name']}, {one['block_count']} blocks"


def _sessions(client: AdminClient, word: str) -> Listed:
    outcomes = client.hints(page_size=MAX_VALUES)["outcomes"]
    for name in dict.fromkeys(one["session_id"] for one in outcomes if one["session_id"]):
        yield name, "session of a router"


def _hashes(client: AdminClient, word: str) -> Listed:
    for one in client.blocks(0, MAX_VALUES, hash_prefix=word)["blocks"]:
        yield one["block_hash"][: max(16, len(word))], f"{one['model_name']}, block {one['depth']}"


_LISTED: dict[str, Callable[[AdminClient, str], Listed]] = {
    KEY_SPACE: _key_spaces,
    SESSION: _sessions,
    HASH: _hashes,
}
