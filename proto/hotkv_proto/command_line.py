"""Parses command lines; each error is one line and suggests a similar name."""

import argparse
import difflib
import errno
import faulthandler
import io
import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NoReturn

CLOSE_RATIO = 0.6
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""
_WRONG_CHOICE = re.compile(r"argument ([^:]+): invalid choice: '([^']*)'")


class Parser(argparse.ArgumentParser):
    """Suggests a similar flag or word, in subparsers too. Subcommands must be required
    (`add_subparsers(required=True)`)."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An unknown argument ends the program."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self._named(found).error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def _named(self, found: argparse.Namespace) -> "Parser":
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                named: Parser = action.choices[getattr(found, action.dest)]
                return named._named(found)
        return self

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {self.meant(message)}; {self.prog} --help lists all\n")

    def meant(self, message: str) -> str:
        """Suggests in place of argparse's message."""
        head, found, words = message.partition("unrecognized arguments: ")
        if found:
            wrong = words.split()[0]
            return f"{head}there is no {wrong}{_hint(wrong.partition('=')[0], self._flags())}"
        if match := _WRONG_CHOICE.match(message):
            name, word = match.groups()
            return f"there is no {name} {word}{_hint(word, self._words(name))}"
        return message

    def _flags(self) -> Iterator[str]:
        for parser in (self, *self._parsers().values()):
            for action in parser._actions:
                yield from action.option_strings

    def _words(self, name: str) -> Iterator[str]:
        for action in self._actions:
            if action.choices and name in (action.dest, action.metavar, *action.option_strings):
                yield from map(str, action.choices)

    def _parsers(self) -> dict[str, argparse.ArgumentParser]:
        found: dict[str, argparse.ArgumentParser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found.update(action.choices)
        return found


def _hint(word: str, known: Iterator[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1, CLOSE_RATIO)
    return f"; did you mean {close[0]}?" if close else ""


def complete_words(make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Answers a shell that asks how a word may continue, and ends the program. Does nothing for
    other callers."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(make_parser(), always_complete_options="long")


def open_streams() -> None:
    """Must be called first in a program. Opens /dev/null for standard streams that the caller
    has closed (`>&-`): otherwise the next file would get the number, and `sys` None. A native
    fault (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) leaves all threads' stacks on standard
    error."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # Gets the lowest free number.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode))
    if not faulthandler.is_enabled():
        faulthandler.enable(2)


def ended(command: Callable[[], int]) -> int:
    """The command's exit status: 130 after Ctrl-C, 0 if the reader stops early, as `head` does,
    1 if the output's disk is full. Characters that the terminal's encoding lacks become `?`."""
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    try:
        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Otherwise Python would write its buffer again at exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 0
        print(f"the output is not whole: {error.strerror}", file=sys.stderr)
        return 1


def columns(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> str:
    """Formats a table. Columns in `left` are aligned left, others right. A row without cells is
    an empty line."""
    widths = [max(len(row[at]) for row in rows if row) for at in range(len(rows[0]))]
    put = [str.ljust if at in left else str.rjust for at in range(len(widths))]
    lines = (
        [fit(cell, width) for fit, cell, width in zip(put, row, widths, strict=False)]
        for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)
