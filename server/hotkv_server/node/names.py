"""The names by which the status page, commands and logs show engines and models to people.

Always true: no decision depends on a name. Without one, an engine is shown by its id, a model by
its key space's name. Engines with open sessions have different shown names. The oldest names are
forgotten. A file keeps them for the ledger, which also shows ended engines. On the event loop; a
`Clerk` thread writes, with at most one write queued.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hotkv_proto.keys import KeySpace
from hotkv_server.memory.state import read_file, replace_file

log = logging.getLogger(__name__)

NAMES_FILE = "names.json"
FORMAT_VERSION = 1
MAX_NAMES = 1024
"""Of engines, and of models."""
MAX_BYTES = 32 << 20
"""The longest names need less; JSON writes a character as up to 12 bytes."""
DIGITS = 16
"""Leading hexadecimal digits of a fingerprint that name a key space here and in the ledger."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineNames:
    """told: by the engine itself; may be empty.
    shown: `told`, with a number if another engine has it.
    model: by which requests address the model; may be empty.
    """

    told: str
    shown: str
    model: str


class DisplayNames:
    """directory: None: names are not written.
    do: runs its argument on another thread.
    """

    def __init__(
        self,
        directory: Path | None = None,
        do: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        self._path = None if directory is None else directory / NAMES_FILE
        self._do = do
        self._engines: dict[str, EngineNames] = {}
        self._models: dict[str, str] = {}
        self._saved: tuple[dict[str, EngineNames], dict[str, str]] = {}, {}
        self._is_queued = False
        if self._path is not None:
            self._read(self._path)

    def __repr__(self) -> str:
        return f"DisplayNames({len(self._engines)} engines, {len(self._models)} models)"

    def tell(
        self, engine_id: str, name: str, model: str, key_space: KeySpace, beside: Iterable[str]
    ) -> None:
        """An empty name keeps the earlier. `beside`: engines with open sessions, whose names are
        taken."""
        if not (name or model):
            return
        before = self._engines.get(engine_id, EngineNames("", "", ""))
        told = name or before.told
        # An engine without a name is shown by its id, which is then its name.
        taken = {self.engine(other) for other in beside if other != engine_id}
        shown = before.shown if told == before.told else told
        number = 1
        while shown in taken:
            number += 1
            shown = f"{told}#{number}"
        after = EngineNames(told, shown, model or before.model)
        digits = digits_of(key_space)
        is_new = after != before or (model and model != self._models.get(digits))
        _put(self._engines, engine_id, after)
        if model:
            _put(self._models, digits, model)
        if is_new:
            self._save()

    def engine(self, engine_id: str) -> str:
        found = self._engines.get(engine_id)
        return (found.shown if found is not None else "") or engine_id

    def model(self, digits: str, otherwise: str, engine_id: str = "") -> str:
        """The first that exists: the name from `engine_id`, the latest from any engine of the
        key space, `otherwise`."""
        found = self._engines.get(engine_id)
        return (found.model if found is not None else "") or self._models.get(digits) or otherwise

    def model_of(self, key_space: KeySpace, engine_id: str = "") -> str:
        """As `model`, or else `key_space.model`."""
        return self.model(digits_of(key_space), key_space.model, engine_id)

    # The file

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(read_file(path, MAX_BYTES))
            if content["format"] != FORMAT_VERSION:
                raise ValueError(f"its format is {content['format']!r}")
            engines = {
                str(engine_id): EngineNames(*map(str, words))
                for engine_id, words in content["engines"].items()
            }
            models = {str(digits): str(name) for digits, name in content["models"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("names of earlier engines are lost: %s can't be used: %s", path, error)
            return
        self._engines, self._models = engines, models

    def _save(self) -> None:
        """A write that is queued already will include the newest names."""
        if self._path is None:
            return
        # Copies: another thread makes the file's text from them, which may be megabytes.
        self._saved = dict(self._engines), dict(self._models)
        if not self._is_queued:
            self._is_queued = True
            self._do(self._write)

    def _write(self) -> None:
        # Before the names are read: a later change then queues another write.
        self._is_queued = False
        assert self._path is not None
        engines, models = self._saved
        content: Mapping[str, Any] = {
            "format": FORMAT_VERSION,
            "engines": {
                engine_id: [one.told, one.shown, one.model] for engine_id, one in engines.items()
            },
            "models": models,
        }
        try:
            replace_file(self._path, json.JSONEncoder().iterencode(content))
        except OSError as error:
            log.warning("names not saved, a restart loses them: %s", error)


def digits_of(key_space: KeySpace) -> str:
    return key_space.fingerprint.hex()[:DIGITS]


def _put(names: dict[str, T], key: str, value: T) -> None:
    """Forgets the oldest beyond MAX_NAMES."""
    names.pop(key, None)
    names[key] = value
    while len(names) > MAX_NAMES:
        del names[next(iter(names))]
