"""Tests the Markdown pages: links, named paths and tests exist; pictures are small and fit dark
mode."""

import ast
import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from hotkv_sparse.vllm.settings import SparseSettings
from hotkv_vllm.config import ConnectorConfig
from tools import connector_settings, pictures

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "sparse", ROOT / "deploy" / "helm" / "hotkv")
    for path in folder.glob("*.md")
)
PICTURE = re.compile(r'(?:src|srcset)="([^"]+)"')
LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([\w-]+))?\)")
PATH = re.compile(r"`((?:proto|sparse|client|server|connector_vllm|tests|tools)/[\w/.*-]+)`")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of headings, and explicit ones."""
    text = page.read_text()
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = set(re.findall(r'<a name="([\w-]+)">', text))
    return named | {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if not link[0].startswith("http")]
    links += [(picture, "") for picture in PICTURE.findall(page.read_text())]
    for target, anchor in links:
        found = page.parent / target if target else page
        assert found.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(found), f"{target} has no heading for #{anchor}"


def test_pictures_are_small_and_there_for_dark_pages() -> None:
    made = {path.name: path for path in Path(pictures.IMAGES).iterdir()}
    assert [name for name, path in made.items() if path.stat().st_size >= 150_000] == []
    stems = {path.stem for path in made.values() if path.suffix == ".png"}
    assert [stem for stem in stems if f"{stem.removesuffix('_dark')}_dark" not in stems] == []


def test_contributing_names_paths_that_exist() -> None:
    paths = PATH.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 20
    for path in paths:
        assert list(ROOT.glob(path.rstrip("/"))), f"{path} is not there"


def test_page_of_connector_settings_has_each_default() -> None:
    text = connector_settings.PAGE.read_text()
    assert text == connector_settings.page(), "python -m tools.connector_settings"
    own = [one for one in dataclasses.fields(ConnectorConfig) if one.name != "companion"]
    for field in [*own, *dataclasses.fields(SparseSettings)]:
        (row,) = re.findall(rf"^\|.*`hotkv\.{field.name}`.*$", text, re.MULTILINE)
        assert len(row.split("|")[3]) > 20 and connector_settings.shown(field) in row


SOURCES = ("client", "connector_vllm", "proto", "server", "sparse")
FOREIGN = re.compile(r"\((?:vLLM|Python)\)")
SHORT = 12


def words_of_the_code() -> str:
    texts = []
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_trouble_page_quotes_messages_of_the_code() -> None:
    """Short pieces of messages are not compared."""
    page = (ROOT / "docs" / "trouble.md").read_text()
    rows = [
        line for line in page.splitlines() if line.startswith("| ") and not FOREIGN.search(line)
    ]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row.split("|")[1])]
    pieces = [piece.strip() for text in quoted for piece in re.split("…|=", text)]
    told = [piece for piece in pieces if " " in piece and len(piece) > SHORT]
    assert len(told) > 15
    code = words_of_the_code()
    assert [piece for piece in told if piece not in code] == []


PAGE = ROOT / "docs" / "deployments.md"
NAMED = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(\w+))?`")


def test_each_row_names_tests_that_exist() -> None:
    rows, names_tests = [], False
    for before, line in itertools.pairwise(PAGE.read_text().splitlines()):
        if not line.startswith("|"):
            continue
        if set(line) <= set("|- "):
            names_tests = before.rstrip(" |").endswith("test")
        elif before.startswith("|") and names_tests:
            rows.append(line)
    assert len(rows) > 40
    for row in rows:
        assert re.search(r"\| (none|all) \|$", row) or NAMED.search(row), f"no test is named: {row}"
        for file, test in NAMED.findall(row):
            path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "vllm" / file
            found = path if path.exists() else next((ROOT / "tests").rglob(Path(file).name), path)
            assert found.exists(), f"{file} is not there"
            assert not test or f"def {test}(" in found.read_text(), f"{file} has no {test}"
