"""Parses a Dockerfile into stages, and applies .dockerignore."""

import fnmatch
import shutil
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Stage:
    """steps: (instruction, arguments)."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        """The arguments that take effect. Raises IndexError if there are none."""
        return [text for name, text in self.steps if name == instruction][-1]


def parse(text: str) -> list[Stage]:
    stages: list[Stage] = []
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
        elif stages:
            stages[-1].steps.append((instruction, rest.strip()))
    return stages


def is_sent(path: str, ignored: str) -> bool:
    sent = True
    parts = Path(path).parts
    heads = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for pattern in filter(None, (line.strip() for line in ignored.splitlines())):
        plain = pattern.removeprefix("!")
        plain = plain.removeprefix("**/")
        tried = heads if plain == pattern.removeprefix("!") else list(parts)
        if any(fnmatch.fnmatchcase(head, plain) for head in tried):
            sent = pattern.startswith("!")
    return sent


def copy_sent(source: str, target: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    found = (
        [ROOT / source]
        if (ROOT / source).is_file()
        else [path for path in (ROOT / source).rglob("*") if path.is_file()]
    )
    for path in found:
        if is_sent(str(path.relative_to(ROOT)), ignored):
            to = target / path.relative_to(ROOT / source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)
