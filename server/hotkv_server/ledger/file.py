"""Reads and writes the ledger's file in the arena's directory. The file is not part of the cache:
it stays when the cache is created anew, and is deleted only with the directory.

Always true: the file is replaced as a whole.
"""

import os
from pathlib import Path

LEDGER_FILE = "ledger"


def save_ledger(directory: Path, content: bytes) -> None:
    """Replaces the content of the ledger's file. Blocks the calling thread. Raises OSError and
    leaves the old file unchanged if the new file can't be written."""
    scratch = directory / f"{LEDGER_FILE}.new"
    scratch.unlink(missing_ok=True)
    fd = os.open(
        scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    scratch.replace(directory / LEDGER_FILE)


def read_ledger(directory: Path, max_bytes: int) -> bytes | None:
    """Returns the file's content; None if there is no file. Raises OSError if the file can't be
    read, is a link, or is larger than `max_bytes`."""
    try:
        fd = os.open(directory / LEDGER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{LEDGER_FILE} has more than {max_bytes} bytes")
    return content
