"""The pictures of docs/images are small and have a version for dark pages."""

from pathlib import Path

from tools import pictures

MOST_BYTES = 150_000


def test_pictures_are_small_and_there_for_dark_pages() -> None:
    made = {path.name: path for path in Path(pictures.IMAGES).iterdir()}
    for name, path in made.items():
        assert path.stat().st_size < MOST_BYTES, name
        if path.suffix == ".png":
            assert name.endswith("_dark.png") or f"{path.stem}_dark.png" in made
