"""vLLM's sources as a later version might have them."""

import functools
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


class Changed:
    """texts: new content by file; None removes the file."""

    def __init__(self, source: Any, texts: dict[str, str | None]) -> None:
        self._source, self._texts = source, texts

    def read(self, path: str) -> str | None:
        return self._texts[path] if path in self._texts else self._source.read(path)


class Once:
    def __init__(self, source: Any) -> None:
        self.read = functools.cache(source.read)
