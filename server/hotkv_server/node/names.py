"""The names by which the status page, commands and logs show engines and models to people.

Always true: names are only shown, and no decision depends on them. An engine without a name is
shown by its id. A model without a name is shown by the name in its key space. Two engines with open
sessions are never shown by the same name. Memory is bounded: the oldest names are forgotten. The
names are also written to a file beside the arena, because the ledger (counts of hits and savings)
also shows engines that have ended. At most one write of the file is queued. On the event loop; a
`Clerk` thread writes the file.
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
"""Most engines whose names are remembered; also most models."""
MAX_BYTES = 32 << 20
"""Largest file of names that is read. The longest names need less; JSON writes a character as up to
12 bytes."""
DIGITS = 16
"""Number of leading hexadecimal digits of a key space's fingerprint that identify the key space in
the file of names and in the ledger."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineNames:
    """The names of one engine.

    told: name that the engine gave itself; empty without a name.
    shown: name by which people see the engine: `monitoring`, with a number if another engine has
        that name.
    model: name by which requests to the engine address the model; empty if unknown.
    """

    told: str
    shown: str
    model: str


class DisplayNames:
    """Remembers the names of engines by engine id, and of models by key space (a model in a
    configuration).

    directory: directory of the file of names; None: names are not written.
    do: function that runs its argument on another thread.
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
        """Remembers the names that an engine reported with a new session. An empty name keeps the
        earlier name.

        name: name that the engine gave itself.
        model: name by which requests to the engine address the model.
        beside: ids of the engines that have an open session. The name that people see differs from
            the names of these engines.
        """
        if not (name or model):
            return
        before = self._engines.get(engine_id, EngineNames("", "", ""))
        told = name or before.told
        # The names of the other engines. If an engine has no name, people see its id, so the id
        # counts as its name.
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
        """Returns the name by which an engine is shown: its own name, with a number if another
        engine has the same name; its id if it has no name."""
        found = self._engines.get(engine_id)
        return (found.shown if found is not None else "") or engine_id

    def model(self, digits: str, otherwise: str, engine_id: str = "") -> str:
        """Returns the name by which a model is shown: the first of these names that exists.

        - the name that the engine `engine_id` has reported
        - the latest name that any engine of the key space has reported
        - the argument `otherwise`

        digits: leading digits of the key space's fingerprint, as `digits_of` returns them.
        """
        found = self._engines.get(engine_id)
        return (found.model if found is not None else "") or self._models.get(digits) or otherwise

    def model_of(self, key_space: KeySpace, engine_id: str = "") -> str:
        """Returns the name by which the model of a key space (a model in a configuration) is shown:
        the first of these names that exists.

        - the name that the engine `engine_id` has reported
        - the latest name that any engine of the key space has reported
        - `key_space.model`
        """
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
        """Queues a write of the file of names. Does nothing if a write is queued already, because
        that write will include the newest names."""
        if self._path is None:
            return
        # Pass copies, because another thread makes the file's text from them. (That may take long:
        # the longest possible names have megabytes together.)
        self._saved = dict(self._engines), dict(self._models)
        if not self._is_queued:
            self._is_queued = True
            self._do(self._write)

    def _write(self) -> None:
        # Reset this before the names are read: a change that comes later then queues another write.
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
    """Returns the leading DIGITS digits of a key space's fingerprint, in hexadecimal."""
    return key_space.fingerprint.hex()[:DIGITS]


def _put(names: dict[str, T], key: str, value: T) -> None:
    """Sets the names that are stored for `key`, and moves `key` to the end of `names`. If there are
    then more than MAX_NAMES keys, forgets the oldest, which are the first."""
    names.pop(key, None)
    names[key] = value
    while len(names) > MAX_NAMES:
        del names[next(iter(names))]
