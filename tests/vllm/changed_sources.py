"""vLLM's sources as a later version might have them."""

from collections.abc import Sequence
from typing import Any


class Replaced:
    """changes: file, old text, new text; more columns are ignored."""

    name = "a later vLLM"

    def __init__(self, source: Any, changes: Sequence[tuple[str, ...]]) -> None:
        self._source, self._changes = source, changes
        self.paths = source.paths

    def read(self, path: str) -> str | None:
        text: str | None = self._source.read(path)
        for file, before, after, *_ in self._changes if text is not None else ():
            if file == path:
                assert before in text, f"{path} has no {before!r}"
                text = text.replace(before, after, 1)
        return text
