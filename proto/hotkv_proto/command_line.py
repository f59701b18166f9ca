"""Parses command lines; each error is one line and suggests a similar name. Lays out what commands
print: words, tables, progress."""

import argparse
import difflib
import errno
import faulthandler
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

CLOSE_RATIO = 0.6
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""
_WRONG_CHOICE = re.compile(r"argument ([^:]+): invalid choice: '([^']*)'")


class Parser(argparse.ArgumentParser):
    """Suggests a similar flag or word, in subparsers too. Takes no abbreviations: a new flag would
    change what they mean. Subcommands must be required (`add_subparsers(required=True)`)."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{"allow_abbrev": False, **named})

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
            if not wrong.startswith("-"):
                return f"{head}{wrong!r} is one word too many"
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


def complete_words(
    make_parser: Callable[[], argparse.ArgumentParser],
    *,
    end: Callable[[int], Any] = os._exit,
    output: TextIO | None = None,
) -> None:
    """Answers a shell that asks how a word may continue, and ends the program. Does nothing for
    other callers.

    output: None: as argcomplete's scripts expect it.
    """
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        files = argcomplete.completers.FilesCompleter()

        def default(prefix: str, action: argparse.Action, **others: Any) -> Any:
            """Files where a file is wanted, else nothing."""
            is_path = action.type is Path or action.metavar == "FILE"
            return files(prefix, action=action, **others) if is_path else ()

        argcomplete.autocomplete(
            make_parser(),
            always_complete_options="long",
            default_completer=default,  # type: ignore[arg-type]
            exit_method=end,
            output_stream=output,
        )


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


# --------------------------------------------------------------------------------- what is printed

MIN_CELL = 12
"""Columns to which a long text in a table may be cut."""
GAP = "  "


def counted(count: float, word: str, plural: str = "") -> str:
    """`1 block`, `2 blocks`.

    plural: if it is not `word` with an s.
    """
    return f"{count:,.0f} {word if count == 1 else plural or word + 's'}"


def digits(value: float) -> str:
    """With three digits or all before the point, and never with an exponent: 1.23, 12300."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 else "0"


def bar(share: float, width: int = 20) -> str:
    """`[#####     ]  50 %`."""
    share = min(1.0, max(0.0, share))
    return f"[{'#' * round(width * share):{width}}] {share:4.0%}".replace("%", " %")


def show_progress(share: float | None = None, text: str = "") -> None:
    """On standard error, in place of the last, if that is a terminal. None: nothing more."""
    if sys.stderr.isatty():
        shown = "" if share is None else f"{bar(share)}  {text}"
        print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)


def terminal_width() -> int | None:
    """None if standard output is no terminal: other programs get whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> str:
    """Formats a table. Columns in `left` are aligned left, others right. A row without cells is
    an empty line.

    On a terminal no line is wider than it: long texts are cut, those in the last column wrapped. A
    table that is wider still becomes a block of lines for each row, a line `header: value` for each
    cell.
    """
    width = terminal_width()
    widths = [max(len(row[at]) for row in rows if row) for at in range(len(rows[0]))]
    if width is not None and not _shrink(widths, rows[0], left, width):
        return _records(rows, width)
    put = [str.ljust if at in left else str.rjust for at in range(len(widths))]
    lines = list[str]()
    for row in rows:
        *cells, last = row or [""]
        fits = [
            fit(_cut(cell, width), width)
            for fit, cell, width in zip(put, cells, widths, strict=False)
        ]
        wrapped = textwrap.wrap(last, widths[-1]) if len(last) > widths[-1] else [last]
        lines.append(GAP.join([*fits, put[-1](wrapped[0], widths[-1])]).rstrip())
        indent = " " * (sum(widths[:-1]) + len(GAP) * (len(widths) - 1))
        lines += [indent + more for more in wrapped[1:]]
    return "\n".join(lines)


def _shrink(widths: list[int], head: Sequence[str], left: Container[int], width: int) -> bool:
    """Makes the widest texts narrower until the line fits; False if it can't."""
    least = [
        min(w, max(MIN_CELL, len(head[at]))) if at in left else w for at, w in enumerate(widths)
    ]
    while sum(widths) + len(GAP) * (len(widths) - 1) > width:
        at = max(range(len(widths)), key=lambda one: (widths[one] > least[one], widths[one]))
        if widths[at] <= least[at]:
            return False
        widths[at] -= 1
    return True


def _cut(cell: str, width: int) -> str:
    """Without its middle: paths differ at their ends, models at their beginnings."""
    end = width // 2
    return cell if len(cell) <= width else f"{cell[: width - end - 1]}…{cell[len(cell) - end :]}"


def _records(rows: Sequence[Sequence[str]], width: int) -> str:
    head, *others = rows
    name_width = max(map(len, head)) + 1
    indent = " " * (name_width + 1)
    blocks = []
    for row in filter(None, others):
        lines = [
            textwrap.fill(
                cell,
                width,
                initial_indent=f"{name + ':':<{name_width}} ",
                subsequent_indent=indent,
            )
            for name, cell in zip(head, row, strict=False)
            if cell
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) if blocks else textwrap.fill(", ".join(filter(None, head)), width)
