"""The pictures of docs/images: a terminal's screen as SVG has its text, places and colours, and the
pictures that are committed are small and have a version for dark pages."""

from pathlib import Path
from xml.etree import ElementTree

import pyte

from tools import pictures

SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 150_000


def test_a_screen_becomes_an_svg() -> None:
    screen = pyte.Screen(20, 3)
    pyte.Stream(screen).feed("a \x1b[32m<b&c>\x1b[0m\r\n\x1b[44m d \x1b[0m\x1b[1;38;5;208me\x1b[0m")
    drawn = ElementTree.fromstring(pictures.as_svg(screen))
    texts = {text.text: text for text in drawn.iter(f"{SVG}text")}
    assert list(map(str.strip, map(str, texts))) == ["a", "<b&c>", "d", "e"]
    width, height = pictures.CELL
    assert texts["<b&c>"].get("fill") == pictures.TERMINAL["green"]
    assert float(texts["<b&c>"].get("x", "")) == 8 + round(2 * width, 1)
    assert float(texts["<b&c>"].get("textLength", "")) == 5 * width
    assert texts["e"].get("fill") == "#ff8700" and texts["e"].get("font-weight") == "bold"
    assert float(texts["e"].get("y", "")) == float(texts["a "].get("y", "")) + height
    assert drawn.get("viewBox", "").split()[3] == f"{2 * height + 16:.0f}"
    (back,) = [one for one in drawn.iter(f"{SVG}rect") if one.get("x")]
    assert back.get("fill") == pictures.TERMINAL["blue"]


def test_pictures_are_small_and_there_for_dark_pages() -> None:
    made = {path.name: path for path in Path(pictures.IMAGES).iterdir()}
    for name, path in made.items():
        assert path.stat().st_size < MOST_BYTES, name
        if path.suffix == ".png":
            assert name.endswith("_dark.png") or f"{path.stem}_dark.png" in made
