"""The access key, read from a file. Always true: no error repeats what the file has."""

import configparser
from dataclasses import dataclass, field
from pathlib import Path

from hotkv_server.security.path_checks import UnsafeError, check_private_key
from hotkv_server.tiers.remote.errors import UnusableError

MAX_FILE_BYTES = 1 << 16
SECTION = "default"


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Who hotkv is at the store. `token`: empty for a key that does not expire."""

    id: str
    secret: str = field(repr=False)
    token: str = field(repr=False)


def read_access_key(path: Path) -> AccessKey:
    """Reads it. Raises UnusableError if everybody may read the file, nobody can, or it has no
    key."""
    try:
        check_private_key(path)
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode()
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        section = parser[SECTION]
        key = AccessKey(
            section["aws_access_key_id"],
            section["aws_secret_access_key"],
            section.get("aws_session_token", ""),
        )
    except (OSError, UnsafeError) as error:
        raise UnusableError(f"can't be asked, because of credentials_file: {error}") from error
    except (configparser.Error, KeyError, UnicodeDecodeError):
        # Without its cause, which quotes lines of the file.
        key = AccessKey("", "", "")
    if not key.id or not key.secret:
        raise UnusableError(
            f"can't be asked, because of credentials_file: {path} must have [{SECTION}] with "
            "aws_access_key_id and aws_secret_access_key"
        )
    return key
