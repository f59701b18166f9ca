"""Reads a chat, which an engine tokenises.

Always true: a chat with images or a cache salt, or for a LoRA adapter that the engine lists, is
refused with the reason: its hashes depend on more than its tokens. So is a chat of gpt-oss, for
which `/tokenize` gives other tokens than the engine computes.
"""

import http
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotkv_client.command import engines
from hotkv_client.command.engines import MAX_ANSWER_BYTES
from hotkv_client.command.prompts import json_of, packed, text_of, tokens_of

_ASK_HASHES = "explain can't compute them from tokens: give block hashes, or --session"
PASSED_ON = (
    "model", "messages", "prompt", "tools", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "mm_processor_kwargs",
)  # fmt: skip
"""Fields that affect the token ids, sent to `/tokenize`."""
FOR_TEMPLATE = "documents", "reasoning_effort"
"""Fields that vLLM hands to the chat template. `/tokenize` lacks them: sent as the template's
arguments."""

HARMONY = [200006, 17360, 200008]
"""`<|start|>system<|message|>`, with which every chat of gpt-oss begins. vLLM formats these with
openai-harmony (`OnlineRenderer._make_request_with_harmony`), and `/tokenize` differs, for
example if VLLM_SYSTEM_START_DATE is set."""


def tokenized(path: Path, engine: str, timeout_s: float) -> bytes:
    """Packed token ids from an engine. Raises OSError if the file can't be read, ValueError if it
    has no chat or prompt, or one that is refused, or if the engine does not answer or rejects the
    API key.

    path: a request of vLLM's chat or completion API in JSON, a list of messages, or plain text.
    engine: URL, such as `http://127.0.0.1:8000`.
    """
    asked = _asked(_request(path))
    found, url = engines.ask(engine, "tokenize", asked, timeout_s)
    if _is_adapter(asked.get("model"), urllib.parse.urljoin(url, "v1/models"), timeout_s):
        raise ValueError(f"{path}: {asked['model']} is an adapter; {_ASK_HASHES}")
    tokens = tokens_of(found)
    if "messages" in asked and tokens[: len(HARMONY)] == HARMONY:
        raise ValueError(
            f"{path}: gpt-oss gets a chat in the format Harmony, but /tokenize uses the chat "
            "template: give block hashes, or --session"
        )
    return packed(tokens)


def _asked(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request for `/tokenize` that gives the same token ids."""
    asked = {name: value for name, value in request.items() if name in PASSED_ON}
    extra = {name: request[name] for name in FOR_TEMPLATE if request.get(name) is not None}
    given = request.get("chat_template_kwargs") or {}
    if "messages" not in request or not extra or not isinstance(given, dict):
        return asked
    if (effort := extra.get("reasoning_effort")) is not None:
        # As vLLM's `ChatCompletionRequest.build_chat_params`.
        given = {"enable_thinking": effort != "none", **given}
    return {**asked, "chat_template_kwargs": {**given, **extra}}


def _is_adapter(model: Any, url: str, timeout_s: float) -> bool:
    """An adapter has a parent in the engine's list of models. False if the list can't be read.
    Raises ValueError if the engine rejects the API key in VLLM_API_KEY."""
    key = os.environ.get("VLLM_API_KEY", "")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            listed = json.loads(answer.read(MAX_ANSWER_BYTES))["data"]
        return any(one["id"] == model and one.get("parent") for one in listed)
    except urllib.error.HTTPError as error:
        if model and error.code == http.HTTPStatus.UNAUTHORIZED:
            raise ValueError(f"{url} wants the engine's API key: set VLLM_API_KEY") from error
        return False
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return False


def _request(path: Path) -> Mapping[str, Any]:
    """Raises OSError if the file can't be read; ValueError if it has no request, truncates its
    prompt, or has images or a cache salt."""
    text = text_of(path)
    if not text.lstrip().startswith(("{", "[")):
        return {"prompt": text.removesuffix("\n")}
    found = json_of(text, str(path))
    if isinstance(found, list):
        found = {"messages": found}
    request: dict[str, Any] = found if isinstance(found, dict) else {}
    messages = request.get("messages", [])
    if not isinstance(messages, list) or not ("messages" in request or "prompt" in request):
        raise ValueError(
            f"{path}: no chat: give a request with messages or prompt, a list of messages, or text"
        )
    if request.get("cache_salt"):
        raise ValueError(f"{path}: cache_salt changes the hashes of its blocks; {_ASK_HASHES}")
    if request.get("truncate_prompt_tokens") is not None:
        raise ValueError(
            f"{path}: truncate_prompt_tokens removes tokens, but /tokenize does not; leave it out "
            "and give the rest of the prompt"
        )
    for message in messages:
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind not in ("text", "refusal", "thinking"):
                raise ValueError(
                    f"{path}: the content of a part of type {kind} is in the hashes of its blocks; "
                    f"{_ASK_HASHES}"
                )
    return request
