"""The Markdown pages name files that exist: their links, and the paths in CONTRIBUTING."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "sparse", ROOT / "deploy" / "helm" / "hotkv")
    for path in folder.glob("*.md")
)
LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([\w-]+))?\)")
PATH = re.compile(r"`((?:proto|sparse|client|server|connector_vllm|tests|tools)/[\w/.*-]+)`")


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them, and those that it gives by itself."""
    text = page.read_text()
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = set(re.findall(r'<a name="([\w-]+)">', text))
    return named | {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if not link[0].startswith("http")]
    for target, anchor in links:
        found = page.parent / target if target else page
        assert found.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(found), f"{target} has no heading for #{anchor}"


def test_contributing_names_paths_that_exist() -> None:
    paths = PATH.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 20
    for path in paths:
        assert list(ROOT.glob(path.rstrip("/"))), f"{path} is not there"
