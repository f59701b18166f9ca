"""Writes docs/deployments.md's section about pairs of features, from `tests/pairs/table.py`.

`python -m tools.pairs_table` writes it; `--check` fails if a pair has no answer, an answer names
no test, or the page is out of date.
"""

import argparse
import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.pairs.table import (
    FEATURES,
    REAL_ONLY,
    TIERS,
    Answer,
    Kind,
    Pair,
    answer,
    names_of,
    pairs,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "deployments.md"
BEGIN, END = "<!-- pairs: begin -->", "<!-- pairs: end -->"
HEAD = """
## Pairs of features

Of the {counts}. All others work
(`tests/pairs/table.py` has the features, and the test of each pair).

The harness runs sets of two to four features under random traffic (`tests/pairs/test_pairs.py`;
`make torture` also runs each pair alone, and random triples). It checks every KV value that
attention reads, and at the end every block of the server and of vLLM's cache. With {tiers}
it runs over real daemons with a disk and a Valkey (`tests/pairs/test_nodes.py`). Pairs of
`residency` and `offloading` run in real engines beside a real daemon, those of `residency` also
with `"residency": "auto"` (`tests/sparse/engines/test_residency_auto.py`).
"""


def lists(answers: dict[Pair, Answer]) -> Iterator[str]:
    """Two tables: refused pairs, and pairs that cannot meet."""
    yield "\n| refused pairs | message | test |\n|---|---|---|"
    yield from _rows(answers, Kind.REFUSED, lambda one: f'"{one.words} …" | `{_plain(one.test)}`')
    yield "\n| pairs that cannot meet | reason |\n|---|---|"
    yield from _rows(answers, Kind.APART, lambda one: one.words)


def _rows(answers: dict[Pair, Answer], kind: Kind, told: Callable[[Answer], str]) -> Iterator[str]:
    by_words: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for pair, one in answers.items():
        if one.kind is kind:
            order = list(dict.fromkeys((*reversed(REAL_ONLY), *FEATURES)))
            first, second = sorted(pair, key=order.index)
            by_words[told(one)][first].append(second)
    for words, named in by_words.items():
        pairs_of_words = "; ".join(f"{name} with {', '.join(them)}" for name, them in named.items())
        yield f"| {pairs_of_words} | {words} |"


def section(answers: dict[Pair, Answer]) -> str:
    """The section without its markers."""
    kinds = [one.kind for one in answers.values()]
    counts = (
        f"{len(kinds)} pairs {kinds.count(Kind.HARNESS)} run in the harness, "
        f"{kinds.count(Kind.DAEMON)} over real daemons\nand {kinds.count(Kind.REAL)} in real "
        f"engines, {kinds.count(Kind.REFUSED)} are refused, {kinds.count(Kind.APART)} cannot meet"
    )
    head = HEAD.format(
        counts=counts,
        tiers=", ".join(f"`{name}`" for name in TIERS),
    )
    return head + "\n".join(lists(answers)) + "\n"


def faults(answers: dict[Pair, Answer]) -> Iterator[str]:
    """Answers whose test does not exist, or that lack a test or reason of their kind."""
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
    """The test's name without parameters."""
    return test.partition("[")[0]


@functools.cache
def _tests_of(file: str) -> frozenset[str]:
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    body: Iterable[ast.stmt] = ast.parse(path.read_text()).body
    return frozenset(one.name for one in body if isinstance(one, ast.FunctionDef))


def main() -> int:
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
