"""Fakes of vLLM's source files as a later version of vLLM might have them. With them, tests check
that hotkv notices changes of vLLM."""

import functools
from collections.abc import Sequence
from typing import Any


class Replaced:
    """vLLM's source files with some texts replaced.

    changes: rows that begin with a file, an old text and a new text; the rest of a row is ignored.
    """

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
    """vLLM's source files, some of them with other content.

    texts: maps a file to its new content; None removes the file.
    """

    def __init__(self, source: Any, texts: dict[str, str | None]) -> None:
        self._source, self._texts = source, texts

    def read(self, path: str) -> str | None:
        return self._texts[path] if path in self._texts else self._source.read(path)


class Once:
    """A wrapper of source files that reads each file only once and caches its text."""

    def __init__(self, source: Any) -> None:
        self.read = functools.cache(source.read)
