"""Tests the documentation site: its contents list every page, and links lead to pages of the
site."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import program
from tools import site_build, site_check

ROOT = Path(__file__).resolve().parents[2]
DOCS_VENV = Path(os.environ.get("DOCS_VENV", ROOT / ".venv-docs"))
BUILD = ROOT / "tools" / "site_build.py"
FRONT = """# Map

[first.md](first.md), [its end](first.md#the-end), [settings](../deploy/a.toml)

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="images/one_dark.svg">
  <img alt="One" src="images/one.svg">
</picture>
"""
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><text fill="black"/></svg>'
FIRST = """# First

A paragraph:
- an item: [read me](../README.md#use-it), [up](README.md)

```mermaid
flowchart LR
  A --> B
```

**Named.** <a name="named"></a>A paragraph, and [a link to it](#named).

## The end
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A front page and `first`, which link to each other and outside of the docs."""
    files = {
        "docs/README.md": FRONT,
        "docs/first.md": FIRST,
        "docs/nav.toml": '[[section]]\ntitle = "All"\npages = ["first.md", "/README.md"]\n'
        'titles = {"/README.md" = "Read it"}\n',
        "docs/conf.py": (ROOT / "docs" / "conf.py").read_text(),
        "deploy/a.toml": "a = 1\n",
        "README.md": "# Read me\n\n## Use it\n\n[map](docs/README.md)\n\n"
        "![Two](docs/images/two.svg)\n",
        "docs/images/one.svg": SVG,
        "docs/images/one_dark.svg": SVG.replace("black", "white"),
        "docs/images/two.svg": SVG.replace("black", "red"),
    }
    for name, content in files.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "repository"


def test_the_table_of_contents_has_every_page() -> None:
    named = {page for section in site_build.read_nav(ROOT) for page in section.pages}
    written = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert written - named == {"docs/README.md"} and len(written) > 15


def built(repository: Path) -> subprocess.CompletedProcess[str]:
    """Like `make docs`, without its check of links."""
    python = DOCS_VENV / "bin" / "python"
    if not python.exists():
        pytest.skip("no Sphinx here: `make docs` installs it")
    command = [python, BUILD, "--root", repository]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_repository_becomes_a_site(repository: Path) -> None:
    done = built(repository)
    assert done.returncode == 0, done.stderr
    site = repository / "site"
    problems, num_pages, _ = site_check.check(site)
    assert problems == [] and num_pages == 5
    page = (site / "first.html").read_text()
    assert "<li>" in page and 'href="#named"' in page and "first_0_dark.svg" in page
    assert "A" in (site / "_images" / "first_0_light.svg").read_text()
    assert "one_dark.svg" in (site / "index.html").read_text()
    assert "two.svg" in (site / "source" / "README.html").read_text()


@pytest.mark.parametrize("link", ["first.md#gone", pytest.param("gone.md", marks=pytest.mark.long)])
def test_a_link_that_leads_nowhere_is_no_site(repository: Path, link: str) -> None:
    front = repository / "docs" / "README.md"
    front.write_text(FRONT.replace("first.md#the-end", link))
    done = built(repository)
    assert done.returncode != 0 and "gone" in done.stderr


@pytest.mark.long
def test_search_works_from_the_file_system(repository: Path) -> None:
    chromium = program("chromium")
    assert built(repository).returncode == 0
    address = f"file://{repository}/site/search.html?q=settings"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={repository}", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([*command, address], capture_output=True, text=True, check=False)
    assert "found one page" in done.stdout and 'href="index.html"' in done.stdout
