"""Start-up: from the settings to the objects that the daemon runs.

`places` checks and locks directories, `process` prepares the process, `arena` opens the memory,
`cache` makes the core and restores its blocks, `access` makes the access control, `listeners` opens
the sockets. `daemon.py` calls these steps in order. A step that fails raises StartError.
"""


class StartError(Exception):
    """Raised if the server can't start. The message names the fix."""
