"""What can go wrong with a server, in words that people can act on. No message has a secret in
it."""

MAX_WORDS = 200


class StoreError(Exception):
    """The call has failed, and its connection must not be used any more. The message goes on after
    the server's name, such as "valkey at ...": it names neither."""


class MissingError(Exception):
    """A library is not installed; the message says what to do."""


class LostError(StoreError):
    """The connection has ended, or what came over it is no reply that was asked for."""


class LateError(StoreError):
    """The time limit has passed."""


class UnusableError(StoreError):
    """The server answers, but cannot be used as it is, or not by this user."""


def quoted(text: bytes) -> str:
    """What a server said, in printable characters, shortened."""
    said = text.decode("utf-8", "replace")[:MAX_WORDS]
    return repr("".join(char if char.isprintable() else "?" for char in said))
