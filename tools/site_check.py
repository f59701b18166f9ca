"""Checks a built site: internal links and anchors have targets, pages load only from the site,
no Markdown is left in texts, no title is a Markdown file's name, and the search index has every
page. Reads only the site's files."""

import json
import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""Elements whose address a browser loads with the page, and its attribute."""
TITLED = {"title", "a"}
"""Elements whose text is a page's title."""
NOT_LOADED = {"canonical", "prev", "next", "alternate"}
"""Values of `rel` that a browser does not load."""
STYLE_URL = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])((?:https?:)?//[^'")]+)""")
LEFT_OVER = re.compile(r"^(?:\||[-*] |\d+\. |```)", re.MULTILINE)
"""A list, table or code fence that Sphinx has not understood."""
INDEX = Path("searchindex.js")
UNSEARCHED = {"search.html"}


@dataclass
class Page(HTMLParser):
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    """Texts of the title and of links."""
    loaded: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)
    _in_paragraph: bool = False
    _in_code: int = 0
    _in_title: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and values.get("rel") not in NOT_LOADED:
            self.loaded.append(values[LOADED[tag]])
        if tag == "p":
            self._in_paragraph = True
            self.paragraphs.append("")
        self._in_code += tag == "code"
        if tag in TITLED:
            self._in_title += 1
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._in_paragraph = False
        self._in_code -= tag == "code"
        self._in_title -= tag in TITLED

    def handle_data(self, data: str) -> None:
        if self._in_paragraph:
            self.paragraphs[-1] += "code" if self._in_code else data
        if self._in_title and not self._in_code:
            self.titles[-1] += data


def read_pages(site: Path) -> dict[Path, Page]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text())
    return pages


def broken_link(link: str, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    """None if valid, or to another host."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    base = site if parts.path.startswith("/") else path.parent
    found = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path.resolve()
    if found.is_dir():
        found /= "index.html"
    if not found.is_relative_to(site.resolve()) or not found.is_file():
        return f"{link}: is not there"
    target = pages.get(site / found.relative_to(site.resolve()))
    if target and parts.fragment and unquote(parts.fragment) not in target.anchors:
        return f"{link}: the page has no such anchor"
    return None


def check(site: Path) -> tuple[list[str], int, int]:
    """(problems, number of pages, number of links)."""
    pages = read_pages(site)
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site)
        faults = [broken_link(link, path, site, pages) for link in [*page.links, *page.loaded]]
        faults += [
            f"{address}: comes from another host"
            for address in page.loaded
            if urlsplit(address).netloc
        ]
        faults += [
            f"Markdown as text: {text.strip()[:60]!r}"
            for text in page.paragraphs
            if LEFT_OVER.search(text)
        ]
        faults += [
            f"the name of a file as a title: {text.strip()!r}"
            for text in page.titles
            if text.strip().endswith(".md")
        ]
        problems += [f"{name}: {fault}" for fault in faults if fault]
    for path in sorted(site.rglob("*.css")):
        problems += [
            f"{path.relative_to(site)}: {address}: comes from another host"
            for address in STYLE_URL.findall(path.read_text())
        ]
    problems += [f"{name}: the search does not know it" for name in not_indexed(site, pages)]
    return problems, len(pages), sum(len(page.links) for page in pages.values())


def not_indexed(site: Path, pages: dict[Path, Page]) -> list[str]:
    index = site / INDEX
    text = index.read_text() if index.is_file() else "{}"
    known = set(json.loads(text[text.index("{") : text.rindex("}") + 1]).get("docnames", ()))
    names = {path.relative_to(site).as_posix() for path in pages} - UNSEARCHED
    return sorted(name for name in names if name.removesuffix(".html") not in known)


def main(arguments: list[str]) -> int:
    """1 if there are problems."""
    site = Path(arguments[0] if arguments else "site")
    problems, num_pages, num_links = check(site)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{site}: {num_pages} pages, {num_links} links, {len(problems)} problems")
    return 1 if problems or not num_pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
