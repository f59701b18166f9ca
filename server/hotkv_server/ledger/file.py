"""Reads and writes the ledger's file in the arena's directory. The file is not part of the cache:
it stays when the cache is created anew, and is deleted only with the directory.

Always true: the file is replaced as a whole.
"""

from pathlib import Path

from hotkv_server.memory.state import read_file, replace_file

LEDGER_FILE = "ledger"


def save_ledger(directory: Path, content: bytes) -> None:
    """Replaces the content of the ledger's file. Blocks the calling thread. Raises OSError and
    leaves the old file unchanged if the new file can't be written."""
    replace_file(directory / LEDGER_FILE, [content])


def read_ledger(directory: Path, max_bytes: int) -> bytes | None:
    """Returns the file's content; None if there is no file. Raises OSError if the file can't be
    read, is a link, or is larger than `max_bytes`."""
    try:
        content = read_file(directory / LEDGER_FILE, max_bytes + 1)
    except FileNotFoundError:
        return None
    if len(content) > max_bytes:
        raise OSError(f"{LEDGER_FILE} has more than {max_bytes} bytes")
    return content
