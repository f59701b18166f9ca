"""Start-up: from the settings to the objects that the daemon runs.

`daemon.py` calls these steps in order; one that fails raises StartError. `places` checks and
locks directories, `process` prepares the process, `arena` opens the memory, `cache` makes the
core and restores its blocks, `access` makes the access control, `listeners` opens the sockets.
"""


class StartError(Exception):
    """The server can't start. The message names the fix."""
