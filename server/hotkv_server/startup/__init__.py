"""Start-up: from the settings to the objects that the daemon runs.

Each module makes one kind: `places` checks and locks directories, `process` prepares the process,
`arena` opens the memory, `cache` fills the core, `access` and `listeners` let clients in. The
daemon owns the order. Whatever cannot work raises StartError.
"""


class StartError(Exception):
    """The server can't start; the message says what to do."""
