"""Builds the documentation's site: docs/ and the files to which it links, as HTML with a search. A
warning of Sphinx, such as a broken link or anchor, is an error.

A page has the same text as on GitHub, but for links named by their file
(`[tiers.md](tiers.md)`), which get the page's title. Files outside docs/ are shown below
`source/`. Pictures and diagrams exist for light and for dark pages. Only two folders are
written, from scratch: the pages for Sphinx, and the site.
"""

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
FRONT_PAGE = "docs/README.md"
SOURCE = "source"
"""Folder of the site with files outside docs/."""
LINK = re.compile(r"\]\(([^)#\s]+)((?:#[\w-]+)?)\)")
FILE_NAME = re.compile(r"\[([\w/]+\.md)$")
"""A file's name as a link's text, before the target."""
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
IMAGES = {".png", ".svg"}
IMAGE = re.compile(r"(!\[[^\]]*\])\(([^)#\s]+)\)")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
"""As GitHub shows it. Groups: for dark pages, description, for light pages."""
THEMES = {"light": "neutral", "dark": "dark"}
"""Mermaid's theme of light and dark pages."""
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED_PARAGRAPH = re.compile(r'^(?!\|)(.*)<a name="([\w-]+)"></a>', re.MULTILINE)
"""Not in a table's row, whose name stays HTML."""
LANGUAGES = {
    ".toml": "toml",
    ".py": "python",
    ".proto": "protobuf",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".conf": "ini",
    ".service": "ini",
}
STYLE = """\
.content table.docutils { font-size: 0.9em; }
"""

Draw = Callable[[str, str], str]
"""Maps a diagram and Mermaid's theme to SVG."""


class SiteError(Exception):
    """Names page and reason."""


@dataclass(frozen=True, slots=True)
class Section:
    """pages: relative to the repository's root.
    titles: for pages whose own title is not used.
    """

    title: str
    pages: tuple[str, ...]
    titles: Mapping[str, str]


def read_nav(root: Path) -> list[Section]:
    """Raises SiteError if a page of docs/ is left out or listed twice, or one does not exist."""
    content = tomllib.loads((root / DOCS / "nav.toml").read_text())
    sections = []
    for one in content["section"]:
        pages = tuple(
            page.removeprefix("/") if page.startswith("/") else posixpath.join(DOCS, page)
            for page in one["pages"]
        )
        titles = one.get("titles", {})
        shown = zip(pages, one["pages"], strict=True)
        sections.append(
            Section(
                one["title"], pages, {path: titles[page] for path, page in shown if page in titles}
            )
        )
    strays = {
        page for one in content["section"] for page in set(one.get("titles", {})) - {*one["pages"]}
    }
    named = [page for section in sections for page in section.pages]
    written = {path.relative_to(root).as_posix() for path in (root / DOCS).rglob("*.md")}
    problems = [
        *(f"{page} is missing" for page in sorted(written - {FRONT_PAGE} - set(named))),
        *(f"{page} is there twice" for page in sorted(set(named)) if named.count(page) > 1),
        *(f"{page} has a title, and is not in that section" for page in sorted(strays)),
        *(f"{page} does not exist" for page in named if not (root / page).is_file()),
    ]
    if problems:
        raise SiteError(f"{DOCS}/nav.toml: {'; '.join(problems)}")
    return sections


def page_of(path: str) -> str:
    """The site's page, in Markdown, of a file."""
    if path == FRONT_PAGE:
        return "index.md"
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    page = posixpath.join(SOURCE, path)
    return page if page.endswith(".md") else f"{page}.md"


def resolved(path: str, link: str) -> str:
    """Relative to the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def links(root: Path, path: str, text: str) -> Iterator[tuple[re.Match[str], str]]:
    """(match, path) of links to files of the repository, without images."""
    for match in LINK.finditer(text):
        target = resolved(path, match[1])
        is_image = Path(target).suffix in IMAGES
        if not is_image and not target.startswith("../") and (root / target).is_file():
            yield match, target


def images(path: str, text: str) -> Iterator[str]:
    yield from (resolved(path, match[2]) for match in IMAGE.finditer(text))
    for match in PICTURE.finditer(text):
        yield from (resolved(path, match[1]), resolved(path, match[3]))


def place_of(path: str) -> str:
    inside = path.removeprefix(f"{DOCS}/")
    return inside if inside != path else posixpath.join(SOURCE, path)


def shown_files(root: Path, sections: list[Section]) -> list[str]:
    """All of docs/ in the contents, and what they link to."""
    waiting = [FRONT_PAGE, *(page for section in sections for page in section.pages)]
    found = set(waiting)
    while waiting:
        path = waiting.pop()
        if path.endswith(".md"):
            for _, target in links(root, path, (root / path).read_text()):
                if target not in found:
                    found.add(target)
                    waiting.append(target)
    return sorted(found)


def with_links(root: Path, path: str, text: str) -> str:
    """Links lead to pages of the site."""
    folder = posixpath.dirname(page_of(path)) or "."
    parts, end = [], 0
    for match, target in links(root, path, text):
        link = posixpath.relpath(page_of(target), folder)
        before = text[end : match.start()]
        if (named := FILE_NAME.search(before)) and Path(target).name == Path(named[1]).name:
            before = f"{before[: named.start()]}[{title_of(root, target)}"
        parts += [before, f"]({link}{match[2]})"]
        end = match.end()
    return "".join([*parts, text[end:]])


def title_of(root: Path, path: str) -> str:
    """The path if the page has no title."""
    found = TITLE.search((root / path).read_text())
    return found[1] if found else path


def both(alternative: str, light: str, dark: str) -> str:
    """Sphinx's markup for an image in two versions."""
    return "\n\n".join(
        f"```{{image}} {address}\n:alt: {alternative}\n:class: only-{kind}\n```"
        for kind, address in (("light", light), ("dark", dark))
    )


def with_pictures(path: str, text: str) -> str:
    """At their addresses on the site, in the version of the page's colours."""
    folder = posixpath.dirname(page_of(path)) or "."

    def address(link: str) -> str:
        return posixpath.relpath(place_of(resolved(path, link)), folder)

    text = IMAGE.sub(lambda match: f"{match[1]}({address(match[2])})", text)
    return PICTURE.sub(lambda match: both(match[2], address(match[3]), address(match[1])), text)


def with_diagrams(text: str, page: Path, draw: Draw) -> str:
    """Pictures replace diagrams, and lie beside the page."""

    def drawn(match: re.Match[str]) -> str:
        name = f"{page.stem}_{text.count('```mermaid', 0, match.start())}"
        for kind, theme in THEMES.items():
            (page.parent / f"{name}_{kind}.svg").write_text(draw(match[1], theme))
        return both("Diagram", f"{name}_light.svg", f"{name}_dark.svg")

    return DIAGRAM.sub(drawn, text)


def as_markdown(root: Path, path: str) -> str:
    text = (root / path).read_text()
    if path.endswith(".md"):
        text = with_pictures(path, with_links(root, path, text))
        return NAMED_PARAGRAPH.sub(r"(\2)=\n\1", text)
    language = LANGUAGES.get(Path(path).suffix, "docker" if "Dockerfile" in path else "text")
    front = "" if path.startswith(f"{DOCS}/") else "---\norphan: true\n---\n\n"
    return f"{front}# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


def entry(section: Section, page: str) -> str:
    """In Sphinx's syntax."""
    title = section.titles.get(page)
    return f"{title} <{page_of(page)}>" if title else page_of(page)


def table_of_contents(sections: list[Section]) -> str:
    """For the front page, in Sphinx's syntax."""
    return "\n".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {section.title}\n\n"
        + "\n".join(entry(section, page) for page in section.pages)
        + "\n```"
        for section in sections
    )


def stage(root: Path, folder: Path, draw: Draw) -> int:
    """Returns the number of pages. Raises SiteError."""
    sections = read_nav(root)
    listed = {page for section in sections for page in section.pages}
    shutil.rmtree(folder, ignore_errors=True)
    files = shown_files(root, sections)
    for path in files:
        page = folder / page_of(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        text = with_diagrams(as_markdown(root, path), page, draw)
        if path == FRONT_PAGE:
            text += table_of_contents(sections)
        elif path not in listed and not text.startswith("---"):
            text = f"---\norphan: true\n---\n\n{text}"
        page.write_text(text)
        for image in images(path, (root / path).read_text() if path.endswith(".md") else ""):
            place = folder / place_of(image)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / image, place)
    (folder / "_static").mkdir()
    (folder / "_static" / "site.css").write_text(STYLE)
    shutil.copy(root / DOCS / "conf.py", folder)
    return len(files)


def draw(diagram: str, theme: str) -> str:
    # Only the environment of `make docs` has it.
    import mermaidx

    return str(mermaidx.render(diagram, theme=theme).svg())


def build(folder: Path, site: Path) -> int:
    """Sphinx's exit status."""
    shutil.rmtree(site, ignore_errors=True)
    doctrees = folder.with_name("doctrees")
    shutil.rmtree(doctrees, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    folders = ["-d", str(doctrees), str(folder), str(site)]
    return subprocess.run([*command, *folders], check=False).returncode


def main() -> int:
    """1 if the pages have an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the repository (default: this one)"
    )
    root: Path = parser.parse_args().root
    pages = root / "build" / "docs"
    try:
        stage(root, pages, draw)
    except SiteError as error:
        print(f"site: {error}", file=sys.stderr)
        return 1
    return build(pages, root / "site")


if __name__ == "__main__":
    sys.exit(main())
