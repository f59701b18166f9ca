"""What a server knows of key spaces' epochs in shared tiers, in a small file that outlives it.

Always true: the file is replaced as a whole; `save` returns only when all that was noted before is
in it. It lies wherever blocks lie that outlive the server, and removing those does not remove it.
"""

import json
import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hotkv_server.memory.state import replace_file

log = logging.getLogger(__name__)

EPOCHS_FILE = "epochs.json"
FORMAT_VERSION = 1
UNSURE = 0
"""Noted for a key space whose epoch the files do not agree on: no store has it."""
MAX_UNTOLD = 1 << 14
"""Flushes of one tier that are kept; those that have waited longest are forgotten beyond that."""


@dataclass(slots=True)
class TierNotes:
    """Of one tier, by fingerprint. `epochs`: under which blocks lie here. `mixed`: key spaces of
    which blocks lie here, too, that are older than what is known of epochs. `untold`: key spaces
    that were flushed here without the tier's knowledge, in order."""

    epochs: dict[str, int] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)
    untold: dict[str, None] = field(default_factory=dict)


class EpochNotes:
    """See the module. `folders`: where the file is; none for notes that end with the process. All
    methods but `save` belong to one thread."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._paths = [folder / EPOCHS_FILE for folder in folders]
        self._tiers: dict[str, TierNotes] = {}
        self._writing = threading.Lock()
        self._revision = self._saved = 0
        for path in self._paths:
            self._take_in(path)

    def __repr__(self) -> str:
        counts = (f"{name}: {len(one.untold)} untold" for name, one in self._tiers.items())
        return f"EpochNotes({', '.join(counts)})"

    def epochs(self, tier: str) -> dict[str, int]:
        """The epochs that were noted, by fingerprint."""
        return dict(self._of(tier).epochs)

    def mixed(self, tier: str) -> set[str]:
        """Key spaces of which older blocks lie here than those that the epoch is noted for."""
        return set(self._of(tier).mixed)

    def untold(self, tier: str) -> list[str]:
        """Fingerprints of key spaces that were flushed without the tier's knowledge."""
        return list(self._of(tier).untold)

    def add_untold(self, tier: str, fingerprint: str) -> None:
        """The tier does not know yet of a flush."""
        untold = self._of(tier).untold
        if fingerprint in untold:
            return
        untold[fingerprint] = None
        if len(untold) > MAX_UNTOLD:
            log.error("tier=%s is told of %d flushes at most, one is forgotten", tier, MAX_UNTOLD)
            del untold[next(iter(untold))]
        self._revision += 1

    def settle(self, tier: str, fingerprint: str, epoch: int, *, is_mixed: bool = False) -> None:
        """The tier knows of all flushes. `epoch`: that of the key space now, 0 for none.
        `is_mixed`: older blocks lie here, too."""
        notes = self._of(tier)
        was = (fingerprint in notes.untold, fingerprint in notes.mixed)
        if was == (False, is_mixed) and notes.epochs.get(fingerprint, 0) == epoch:
            return
        notes.untold.pop(fingerprint, None)
        notes.mixed.discard(fingerprint)
        notes.epochs.pop(fingerprint, None)
        if epoch:
            notes.epochs[fingerprint] = epoch
        if is_mixed:
            notes.mixed.add(fingerprint)
        self._revision += 1

    def keep(self, tier: str, fingerprints: Collection[str]) -> None:
        """Forgets the epochs of other key spaces: this server has no block of them. Takes effect
        with the next `save`."""
        notes = self._of(tier)
        notes.epochs = {name: at for name, at in notes.epochs.items() if name in fingerprints}
        notes.mixed = notes.mixed.intersection(fingerprints)

    def save(self) -> None:
        """Writes down what is noted, if it is not there yet. From any thread; blocks. Raises
        OSError, after it has tried all folders."""
        with self._writing:
            revision = self._revision
            if revision == self._saved:
                return
            text = self._text()
            failed: OSError | None = None
            for path in self._paths:
                try:
                    replace_file(path, [text], sync=True)
                except OSError as error:
                    failed = failed or error
            if failed is not None:
                raise failed
            self._saved = revision

    def discard(self) -> None:
        """Removes the file of a server that leaves no blocks, unless a flush is untold. Blocks."""
        if not any(one.untold for one in self._tiers.values()):
            for path in self._paths:
                path.unlink(missing_ok=True)

    def _of(self, tier: str) -> TierNotes:
        return self._tiers.setdefault(tier, TierNotes())

    def _text(self) -> str:
        tiers = {
            name: {
                "epochs": one.epochs.copy(),
                "mixed": sorted(one.mixed.copy()),
                "untold": list(one.untold),
            }
            for name, one in self._tiers.copy().items()
        }
        return json.dumps({"format": FORMAT_VERSION, "tiers": tiers})

    def _take_in(self, path: Path) -> None:
        """Adds what a file says. One that can't be read says nothing."""
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT_VERSION:
                raise ValueError(f"format {content['format']!r}")
            for name, said in content["tiers"].items():
                notes = self._of(name)
                notes.untold.update(dict.fromkeys(map(_fingerprint, said["untold"])))
                notes.mixed.update(map(_fingerprint, said["mixed"]))
                for fingerprint, epoch in said["epochs"].items():
                    known = notes.epochs.setdefault(_fingerprint(fingerprint), int(epoch))
                    if known != int(epoch):
                        notes.epochs[fingerprint] = UNSURE
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.error(
                "%s can't be used, so flushes that stores were not told of are forgotten: %s %s",
                path,
                type(error).__name__,
                error,
            )


def _fingerprint(text: str) -> str:
    """The text, if it may be a fingerprint. Raises ValueError."""
    return bytes.fromhex(text).hex()
