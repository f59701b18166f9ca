"""Start-up: from the settings to the objects that the daemon runs.

`places` checks and locks directories, `process` prepares the process, `arena` opens the memory,
`cache` fills the core, `access` and `listeners` let clients in. The daemon owns the order. All
steps raise StartError if they fail.
"""


class StartError(Exception):
    """The server can't start. The message says how to mend it."""
