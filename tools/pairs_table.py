"""Writes the section on pairs of features of docs/deployments.md from `tests/pairs/table.py`.

`python -m tools.pairs_table` writes it. With `--check` it changes nothing, and fails if a pair has
no answer, if a test that an answer names does not exist, or if the page is out of date.
"""

import argparse
import ast
import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.pairs.table import FEATURES, Answer, Kind, Pair, answer, names_of, pairs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "deployments.md"
BEGIN, END = "<!-- pairs: begin -->", "<!-- pairs: end -->"
HEAD = """
## Pairs of features

Where two features meet: of {counts}. `tools/pairs_table.py` makes this
section from `tests/pairs/table.py`; `make check` fails for a pair without an answer.

- `h`: runs in the harness: vLLM's own scheduler, KV cache manager and connector calls round a model
  that is only arithmetic, with random traffic. Every KV value that attention reads is compared; at
  the end so is every block of the server and of vLLM's own cache, and nothing is left behind
  (`tests/pairs/test_pairs.py`; random triples too, in `make torture`).
- `d`: the same over real daemons with a disk and a Valkey (`tests/pairs/test_nodes.py`).
- `r`: runs with real parts: a real engine and a real daemon.
- `x`: refused, in the words below.
- `-`: cannot meet, for the reason below.

"""
NUMBERS = {name: number for number, name in enumerate(FEATURES, 1)}


def matrix() -> Iterator[str]:
    """Yields a row for each feature, with a letter for each feature before it."""
    yield "```"
    width = max(len(name) for name in FEATURES)
    for digits in ([n // 10 or " " for n in NUMBERS.values()], [n % 10 for n in NUMBERS.values()]):
        yield f"{'':{width + 4}}{' '.join(map(str, digits))}"
    names = list(FEATURES)
    for name, number in NUMBERS.items():
        letters = [answer(frozenset((name, other))).kind.value for other in names[: number - 1]]
        yield f"{number:2} {name:{width}} {' '.join([*letters, '.'])}"
    yield "```"
    yield ""
    yield from itertools.chain(
        ["| | feature |", "|---|---|"],
        (f"| {NUMBERS[name]} `{name}` | {words} |" for name, words in FEATURES.items()),
    )


def lists(answers: dict[Pair, Answer]) -> Iterator[str]:
    """Yields the lists that explain the letters."""
    yield "\n| with real parts | test |\n|---|---|"
    yield from _rows(answers, Kind.REAL, lambda one: f"`{_plain(one.test)}`")
    yield "\n| refused | words | test |\n|---|---|---|"
    yield from _rows(answers, Kind.REFUSED, lambda one: f'"{one.words} …" | `{_plain(one.test)}`')
    yield "\n| cannot meet | reason |\n|---|---|"
    yield from _rows(answers, Kind.APART, lambda one: one.words)


def _rows(answers: dict[Pair, Answer], kind: Kind, told: Callable[[Answer], str]) -> Iterator[str]:
    by_words: dict[str, list[str]] = defaultdict(list)
    for pair, one in answers.items():
        if one.kind is kind:
            by_words[told(one)].append(names_of(pair))
    for words, names in by_words.items():
        yield f"| {', '.join(name.replace('+', ' + ') for name in names)} | {words} |"


def section(answers: dict[Pair, Answer]) -> str:
    """Returns the whole section, without its markers."""
    kinds = [one.kind for one in answers.values()]
    counts = (
        f"{len(kinds)} pairs {kinds.count(Kind.HARNESS)} run in the harness, "
        f"{kinds.count(Kind.DAEMON)} in the\nharness over real daemons and "
        f"{kinds.count(Kind.REAL)} in real engines, {kinds.count(Kind.REFUSED)} are refused in "
        f"words, and {kinds.count(Kind.APART)} cannot\nmeet"
    )
    return HEAD.format(counts=counts) + "\n".join([*matrix(), *lists(answers)]) + "\n"


def faults(answers: dict[Pair, Answer]) -> Iterator[str]:
    """Tests that answers name and that do not exist."""
    for test in sorted({_plain(one.test) for one in answers.values() if one.test}):
        file, _, name = test.partition("::")
        if name not in _tests_of(file):
            yield f"{test}: there is no such test"
    for pair, one in answers.items():
        if (one.kind is Kind.APART) == bool(one.test) or (
            one.kind in (Kind.APART, Kind.REFUSED) and not one.words
        ):
            yield f"{names_of(pair)}: its answer lacks a test, or words"


def _plain(test: str) -> str:
    """Returns a test's name without parameters."""
    return test.partition("[")[0]


@functools.cache
def _tests_of(file: str) -> frozenset[str]:
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    body: Iterable[ast.stmt] = ast.parse(path.read_text()).body
    return frozenset(one.name for one in body if isinstance(one, ast.FunctionDef))


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Write the pairs of docs/deployments.md.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the page is out of date"
    )
    is_check = parser.parse_args().check
    answers: dict[Pair, Answer] = {}
    wrong = []
    for pair in pairs():
        try:
            answers[pair] = answer(pair)
        except (KeyError, ValueError) as error:
            wrong.append(f"{error.args[0]}: add it to tests/pairs/table.py")
    if not wrong:
        wrong += faults(answers)
    if wrong:
        print(*wrong, sep="\n")
        return 1
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}{section(answers)}{END}{after}"
    if not is_check:
        PAGE.write_text(made)
    elif PAGE.read_text() != made:
        print("docs/deployments.md is out of date: python -m tools.pairs_table")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
