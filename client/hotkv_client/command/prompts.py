"""Reads a prompt as a user writes it: token ids, block hashes, an answer of vLLM's `/tokenize`."""

import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from hotkv_client.command.named_blocks import MIN_DIGITS

MAX_TOKEN_ID = 9_999_999
"""No model has more tokens. A larger number is the first digits of a hash."""
MAX_CHARS = 1 << 26
"""Of a file with a prompt."""


def parse_prompt(words: Sequence[str]) -> tuple[list[str], bytes]:
    """Hashes and packed token ids, one of them empty. Raises ValueError if the prompt is empty or a
    file has another format, OSError if a file can't be read.

    words: token ids, hexadecimal hashes or their first digits; `@FILE` and `-` (standard input)
        name a file with these, or with the JSON answer of vLLM's `/tokenize`. One word alone of
        MIN_DIGITS or more is a hash, also without a letter.
    """
    items: list[str] = []
    for word in words:
        text = word
        if word == "-":
            text = content_of(sys.stdin, word)
        elif word.startswith("@"):
            text = text_of(Path(word[1:]))
        if text.lstrip().startswith("{"):
            items += map(str, tokens_of(json_of(text, word)))
        else:
            items += text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    if not items:
        raise ValueError(
            "the prompt is empty; give token ids or block hashes, or --chat FILE --engine URL"
        )
    if [items[0]] == list(words) and len(words[0]) >= MIN_DIGITS:
        # As for `evict`. One token makes no block, so it can't be meant.
        return items, b""
    if all(item.isdecimal() and int(item) <= MAX_TOKEN_ID for item in items):
        return [], packed(map(int, items))
    return items, b""


def packed(token_ids: Any) -> bytes:
    """Little-endian int32."""
    listed = list(token_ids)
    return struct.pack(f"<{len(listed)}i", *listed)


def text_of(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return content_of(file, str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is no text ({error})") from error


def content_of(file: TextIO, where: str) -> str:
    text = file.read(MAX_CHARS + 1)
    if len(text) > MAX_CHARS:
        raise ValueError(f"{where}: more than {MAX_CHARS} characters")
    return text


def json_of(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def tokens_of(answer: Any) -> list[int]:
    """Raises ValueError if the answer has no list of token ids."""
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(
        type(one) is int and 0 <= one <= MAX_TOKEN_ID for one in tokens
    ):
        raise ValueError("the JSON has no list `tokens` of token ids, as vLLM's /tokenize answers")
    return tokens
