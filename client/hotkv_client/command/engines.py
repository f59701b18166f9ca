"""Asks an engine over its HTTP API. `VLLM_API_KEY` is the API key, if it wants one."""

import http
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from hotkv_client.command.prompts import json_of

MAX_ANSWER_BYTES = 256 << 20


def ask(
    engine: str,
    path: str,
    asked: Mapping[str, Any] | None,
    timeout_s: float,
    headers: Mapping[str, str] = {},
) -> tuple[Any, str]:
    """The answer's JSON, and the URL. Raises ValueError if there is none, or if the engine refuses.

    engine: URL, such as `http://127.0.0.1:8000`.
    asked: None for a GET.
    """
    url = urllib.parse.urljoin(engine.removesuffix("/") + "/", path)
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"--engine {engine}: give a URL, such as http://127.0.0.1:8000")
    sent = {"Content-Type": "application/json", **headers}
    if key := os.environ.get("VLLM_API_KEY"):
        sent["Authorization"] = f"Bearer {key}"
    data = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(url, data, sent)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read(MAX_ANSWER_BYTES).decode()
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            raise ValueError(f"{url} wants the engine's API key: set VLLM_API_KEY") from error
        said = error.read(4096).decode(errors="replace")
        raise ValueError(f"{url} answers {error.code}: {_said(said)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise ValueError(f"{url}: {why}; --engine names a vLLM that serves the model") from error
    return json_of(text, url), url


def _said(text: str) -> str:
    """The error's message as one line."""
    try:
        found = json.loads(text)
        message = found["error"]["message"] if "error" in found else found["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = text
    return " ".join(str(message).split())[:500]
