"""Prints the errors of `hotkv`: a line of text, or with `--json` a JSON object. To standard
error, so that standard output has only answers. Functions that print return the command's exit
status."""

import json
import os
import sys
from pathlib import Path

from hotkv_client import targets
from hotkv_proto.errors import HotKVError, NoAnswerError

REFUSED, USAGE = 1, 2
"""Exit statuses: the server refused or does not answer; the input is wrong."""


def refused(error: HotKVError, target: str, *, as_json: bool) -> int:
    message = explained(error, target)
    if as_json:
        _print_json(message, reason=error.reason_name, retryable=error.retryable, target=target)
    else:
        print(f"hotkv: {target}: {message}", file=sys.stderr)
    return REFUSED


def explained(error: HotKVError, target: str) -> str:
    """The error's message, or that the admin socket is missing beside a server's socket for
    engines."""
    path = Path(target.removeprefix("unix:"))
    is_elsewhere = (
        isinstance(error, NoAnswerError)
        and targets.is_unix(target)
        and path.name == targets.ADMIN_SOCKET
        and os.path.exists(path.with_name(targets.USER_SOCKET))
        and not os.path.exists(path)
    )
    if not is_elsewhere:
        return error.message
    return (
        f"beside {targets.USER_SOCKET}, for engines, there is no such socket: the server's admin "
        "socket is elsewhere (security.admin_socket); name it with --target. In Kubernetes and "
        "Compose run this command in hotkv's container"
    )


def wrong(error: Exception, *, as_json: bool) -> int:
    print(usage_failure(str(error)) if as_json else f"hotkv: {error}", file=sys.stderr)
    return USAGE


def failed(message: str, *, as_json: bool) -> int:
    """The command failed on this machine."""
    if as_json:
        _print_json(message, reason="FAILED", retryable=False)
    else:
        print(f"hotkv: {message}", file=sys.stderr)
    return REFUSED


def other_version(error: KeyError) -> str:
    """Why an answer lacks a field."""
    return f"the answer has no {error}, so the server is of another version"


def usage_failure(message: str) -> str:
    return _as_json(message, reason="USAGE", retryable=False)


def _print_json(message: str, **fields: object) -> None:
    print(_as_json(message, **fields), file=sys.stderr)


def _as_json(message: str, **fields: object) -> str:
    return json.dumps({"error": {**fields, "message": message}})
