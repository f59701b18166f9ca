"""Why a vLLM engine has ended, by its log."""

import re
from collections.abc import Sequence

PROCESS = re.compile(r"^\((\w+) pid=\d+\) ?")
"""vLLM puts this before each line of a child."""
HEADER = re.compile(r"^(?:ERROR|WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
BEGIN = "Traceback (most recent call last):"
LINKS = ("During handling of the above", "The above exception was")
DEEPEST = ("Worker", "EngineCore", "")
MOST_LINES = 40


def root_lines(log: str) -> list[str]:
    """The last traceback of the deepest process that wrote one, as those above only write that
    it has ended; without any, the log's last lines."""
    lines = COLOUR.sub("", log).splitlines()
    for depth in DEEPEST:
        own = [_text(line) for line in lines if _process(line).startswith(depth)]
        if found := _last_traceback(own):
            if len(found) > MOST_LINES:
                cut = MOST_LINES // 2
                found = [*found[:cut], "…", *found[-cut:]]
            return found
    return lines[-MOST_LINES:]


def _process(line: str) -> str:
    found = PROCESS.match(line)
    return found[1] if found else ""


def _text(line: str) -> str:
    """The line without process and logger."""
    return HEADER.sub("", PROCESS.sub("", line))


def _last_traceback(lines: Sequence[str]) -> list[str]:
    """With the exceptions that led to it; empty if there is none."""
    begins = [at for at, line in enumerate(lines) if line.strip() == BEGIN]
    if not begins:
        return []
    begin = begins.pop()
    while begins and any(line.startswith(LINKS) for line in lines[max(begin - 3, 0) : begin]):
        begin = begins.pop()
    found: list[str] = []
    is_inside = True
    for line in lines[begin:]:
        is_frame = line.startswith((" ", BEGIN)) or not line.strip() or line.startswith(LINKS)
        if not is_inside and not is_frame:
            break
        is_inside = is_frame
        found.append(line)
    return found
