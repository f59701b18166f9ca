"""Messages that advise an installation name packages of an index: hotkv's extras, never hotkv."""

import re
from pathlib import Path

import pytest

from hotkv_proto import extras

ROOT = Path(__file__).parents[2]
SOURCES = ("proto", "sparse", "client", "server", "connector_vllm")
PROJECT = (ROOT / "pyproject.toml").read_text()
LISTS = re.compile(r"^(\w+) = \[\n((?:  .*\n)*)\]|^(\w+) = \[(\".*\")\]", re.MULTILINE)


def declared() -> dict[str, list[str]]:
    """Returns the packages of each extra from pyproject.toml, without markers."""
    begin = PROJECT.index("[project.optional-dependencies]")
    part = PROJECT[begin : PROJECT.index("\n[", begin + 1)]
    found = ((a or b, c or d) for a, c, b, d in LISTS.findall(part))
    return {
        name: [one.partition(";")[0].strip() for one in re.findall(r'"([^"]+)"', text)]
        for name, text in found
    }


@pytest.mark.parametrize("extra", ["server", "cli", "events", "otel", "s3", "mooncake", "cuda12"])
def test_advice_names_what_the_extra_needs(extra: str) -> None:
    def key(names: list[str]) -> list[str]:
        return sorted(re.split(r"[<>=!~ ]", name)[0].lower() for name in names)

    assert key(extras.packages(extra)) == key(declared()[extra]) != []
    assert extras.advice(extra).startswith("pip install ") and "hotkv" not in extras.advice(extra)


def test_an_unknown_extra_is_installed_from_a_clone() -> None:
    assert extras.advice("nothing") == "pip install '.[nothing]' in a clone of hotkv"


def test_no_message_names_a_package_that_is_on_no_index() -> None:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    assert files and not [path for path in files if "hotkv[" in path.read_text()]
