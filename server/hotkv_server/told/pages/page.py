"""The status page: one file that needs nothing else, and the headers that keep it so.

Always true: the page has no figures in it, it asks the API for them. The browser runs the one
script and the one style sheet of the file, by their hashes, loads nothing from anywhere else, and
makes no elements out of text.
"""

import base64
import hashlib
import re
from importlib import resources

from hotkv_server.told.pages.replies import PRIVATE, Reply

HTML_TYPE = "text/html; charset=utf-8"
FILE = "page.html"


def _hash(tag: str, text: str) -> str:
    """What a Content-Security-Policy calls the one element of this name."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _policy(text: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{_hash('script', text)}'",
            f"style-src 'sha256-{_hash('style', text)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


class Page:
    """The file, read once."""

    def __init__(self) -> None:
        text = resources.files(__package__).joinpath(FILE).read_text("utf-8")
        self._body = text.encode()
        self._headers = {
            **PRIVATE,
            "Content-Security-Policy": _policy(text),
            "Cross-Origin-Opener-Policy": "same-origin",
            "X-Frame-Options": "DENY",
        }

    def reply(self, status: int = 200) -> Reply:
        """The page. With status 401, it begins by asking for a token."""
        return Reply(status, self._body, HTML_TYPE, self._headers)
