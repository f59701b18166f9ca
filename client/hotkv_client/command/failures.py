"""Prints the errors of `hotkv`: as a line of text, or with `--json` as a JSON object.

Errors go to standard error, so that standard output contains only answers.
"""

import json
import os
import sys
from pathlib import Path

from hotkv_client import channels
from hotkv_proto.errors import HotKVError, NoAnswerError

REFUSED, USAGE = 1, 2
"""Exit statuses: REFUSED if the server refused or does not answer, USAGE if the input is wrong."""


def refused(error: HotKVError, target: str, *, as_json: bool) -> int:
    """Prints a server's refusal, or the reason why the server did not answer. Returns the exit
    status of the command."""
    message = explained(error, target)
    if as_json:
        _print_json(message, reason=error.reason_name, retryable=error.retryable, target=target)
    else:
        print(f"hotkv: {target}: {message}", file=sys.stderr)
    return REFUSED


def explained(error: HotKVError, target: str) -> str:
    """Returns the message of an error. If the admin socket `target` is missing beside a server's
    socket for engines, returns a message that says so."""
    path = Path(target.removeprefix("unix:"))
    is_elsewhere = (
        isinstance(error, NoAnswerError)
        and channels.is_unix(target)
        and path.name == channels.ADMIN_SOCKET
        and os.path.exists(path.with_name(channels.USER_SOCKET))
        and not os.path.exists(path)
    )
    if not is_elsewhere:
        return error.message
    return (
        f"beside {channels.USER_SOCKET}, for engines, there is no such socket: the server's admin "
        "socket is elsewhere (security.admin_socket); name it with --target. In Kubernetes and "
        "Compose run this command in hotkv's container"
    )


def wrong(error: Exception, *, as_json: bool) -> int:
    """Prints an error in the user's input. Returns the exit status of the command."""
    print(usage_failure(str(error)) if as_json else f"hotkv: {error}", file=sys.stderr)
    return USAGE


def failed(message: str, *, as_json: bool) -> int:
    """Prints the reason why a command failed on this machine. Returns the exit status of the
    command."""
    if as_json:
        _print_json(message, reason="FAILED", retryable=False)
    else:
        print(f"hotkv: {message}", file=sys.stderr)
    return REFUSED


def other_version(error: KeyError) -> str:
    """Explains to the user why a server's answer lacks a field: the server has another version."""
    return f"the answer has no {error}, so the server is of another version"


def usage_failure(message: str) -> str:
    """Returns the JSON object for an error in the user's input."""
    return _as_json(message, reason="USAGE", retryable=False)


def _print_json(message: str, **fields: object) -> None:
    print(_as_json(message, **fields), file=sys.stderr)


def _as_json(message: str, **fields: object) -> str:
    return json.dumps({"error": {**fields, "message": message}})
