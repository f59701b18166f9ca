"""`hotkv completion SHELL`: a script that completes commands and flags of the command line, made
from its parser."""

import argparse

SHELLS = ("bash", "zsh")
BASH = """\
_hotkv() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case ${{COMP_WORDS[i]}} in
      {commands}) command=${{COMP_WORDS[i]}}; break ;;
    esac
  done
  case $command in
    "") COMPREPLY=($(compgen -W "{words} {flags}" -- "$word")) ;;
{cases}
  esac
}}
complete -o default -F _hotkv hotkv
"""
ZSH_HEAD = "autoload -U +X bashcompinit && bashcompinit\n"


def script(top: argparse.ArgumentParser, shell: str) -> str:
    """What the shell is to read: `source <(hotkv completion bash)`."""
    parsers: dict[str, argparse.ArgumentParser] = {}
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers = dict(action.choices)
    cases = [
        f'    {name}) COMPREPLY=($(compgen -W "{_words(parser)}" -- "$word")) ;;'
        for name, parser in parsers.items()
    ]
    made = BASH.format(
        commands="|".join(parsers),
        words=" ".join(parsers),
        flags=_words(top),
        cases="\n".join(cases),
    )
    return (ZSH_HEAD if shell == "zsh" else "") + made


def _words(parser: argparse.ArgumentParser) -> str:
    """Flags, and words that a positional argument may be."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        found += [flag for flag in action.option_strings if flag.startswith("--")]
        found += [] if action.option_strings else map(str, action.choices or ())
    return " ".join(found)
