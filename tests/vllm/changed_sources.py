"""vLLM's sources as a later version might have them."""

import functools
from collections.abc import Sequence
from typing import Any


class Replaced:
    """vLLM's sources with some texts replaced. Each row of `changes` begins with file, old text and
    new text; the rest of the row is ignored."""

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
    """vLLM's sources in which the given files have other texts; None removes a file."""

    def __init__(self, source: Any, texts: dict[str, str | None]) -> None:
        self._source, self._texts = source, texts

    def read(self, path: str) -> str | None:
        return self._texts[path] if path in self._texts else self._source.read(path)


class Once:
    """Sources that read each file only once."""

    def __init__(self, source: Any) -> None:
        self.read = functools.cache(source.read)
