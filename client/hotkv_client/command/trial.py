"""`hotkv try`: shows that an engine uses the cache, and what a hit saves.

A prompt that nobody has sent before is computed, then sent again, which hits in the engine's own
cache, and a third time after that cache was emptied, or to a second engine: then its blocks come
from hotkv. The answers' tokens and logprobs are compared. What hit where is the engines' own report
to the server, since an API's `cached_tokens` counts both caches together.
"""

import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotkv_client.command import proving
from hotkv_client.command.tables import human_seconds, table

if TYPE_CHECKING:
    from hotkv_client.admin import AdminClient

ANSWER_TOKENS = 8
STORED_S = 20.0
"""Longest wait until the prompt's blocks are stored."""
RESET = "reset_prefix_cache"
RESET_S = 10.0
"""Longest wait for an engine whose requests hold blocks."""
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "with",
)
"""A token or two each, in most vocabularies."""
NOISE = 0.1
"""Of logprobs of one token in two batches, in nats: bfloat16 rounds."""
OTHER_SHAPES = 0.5
"""As NOISE, if the whole prompt was computed: .16 was measured for one token (SmolLM2)."""
MADE = ("computed", "hit in the engine", "hit in hotkv")


@dataclass(frozen=True, slots=True)
class Asked:
    """took_s: of the whole answer."""

    name: str
    engine: str
    took_s: float
    report: Mapping[str, Any]
    tokens: list[proving.Token]

    @property
    def in_hotkv(self) -> int:
        return int(self.report["hit_token_count"] - self.report["device_hit_token_count"])


def run(
    client: "AdminClient", engine: str, second: str, num_tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Raises ValueError if an engine can't be asked, or reports nothing to this server.

    second: URL of another engine with the same model; empty: none.
    """
    model, most = _model(engine)
    num_words = min(num_tokens, most or num_tokens) // 2
    asked = {
        "model": model, "prompt": _new_text(num_words), "max_tokens": ANSWER_TOKENS,
        "temperature": 0, "ignore_eos": True, "logprobs": proving.TOP,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    other = second or engine
    steps: list[Asked] = []
    for whom in dict.fromkeys((engine, other)):
        # An engine's first long prompt takes longer, which would count as saved.
        say(f"warming up: asking {whom}")
        warm = {**(asked if whom == engine else _for(whom, asked)), "prompt": _new_text(num_words)}
        proving.answer(whom, "v1/completions", warm, f"hotkv-try-{os.urandom(8).hex()}")
    for name, whom in zip(MADE, (engine, engine, other), strict=True):
        if name == MADE[2]:
            _wait_stored(client, steps[0])
            why_not = "" if second else _forget(engine)
            if why_not:
                return _told(model, steps, why_not)
        say(f"{name}: asking {whom}")
        steps.append(_step(client, name, whom, asked if whom == engine else _for(whom, asked)))
    return _told(model, steps, "")


def _new_text(num_words: int) -> str:
    """That nobody has sent before."""
    return " ".join(random.SystemRandom().choices(WORDS, k=max(1, num_words)))


def _told(model: str, steps: list[Asked], why_not: str) -> dict[str, Any]:
    first, last = steps[0], steps[-1]
    compared = None
    if len(steps) == len(MADE):
        # A hit of the same length in the engine computes the same rest in the same shapes: rounding
        # is equal then. Computing the whole prompt rounds otherwise.
        own = steps[1]
        is_alike = own.report["device_hit_token_count"] == last.report["hit_token_count"]
        compared = (
            proving.compared(own.tokens, last.tokens, NOISE)
            if is_alike
            else proving.compared(first.tokens, last.tokens, OTHER_SHAPES)
        )
    works = compared is not None and last.in_hotkv > 0 and compared["verdict"] != proving.DIFFERENT
    return {
        "model": model,
        "prompt_token_count": int(first.report["prompt_token_count"]),
        "works": works,
        "why_not": why_not,
        "compared": compared,
        "steps": [
            {
                "name": one.name,
                "engine": one.engine,
                "took_s": one.took_s,
                "device_hit_token_count": int(one.report["device_hit_token_count"]),
                "hit_token_count": int(one.report["hit_token_count"]),
                "outcome": one.report["outcome"],
            }
            for one in steps
        ],
    }


def _model(engine: str) -> tuple[str, int]:
    """The model's name, and the longest context; 0 if the engine does not say."""
    from hotkv_client.command import engines  # Imports most of the time of a command.

    found, url = engines.ask(engine, "v1/models", None, proving.ANSWER_S)
    try:
        first = found["data"][0]
        return str(first["id"]), int(first.get("max_model_len") or 0)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{url}: lists no model") from error


def _for(engine: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    return {**asked, "model": _model(engine)[0]}


def _step(client: "AdminClient", name: str, engine: str, asked: Mapping[str, Any]) -> Asked:
    request = f"hotkv-try-{os.urandom(8).hex()}"
    began_s = time.monotonic()
    tokens = proving.answer(engine, "v1/completions", asked, request)
    took_s = time.monotonic() - began_s
    report = proving.reported(client, request)
    if report is None:
        raise ValueError(
            f"{engine} has answered, but reported no request to this server: does its "
            "--kv-transfer-config name HotKVConnector, and hotkv.target this server? Its log says "
            "why hotkv is off, `hotkv sessions` lists the engines that are connected"
        )
    return Asked(name, engine, took_s, report, tokens)


def _wait_stored(client: "AdminClient", first: Asked) -> None:
    """Until stores have rested: the answer may come before its prompt's blocks are stored."""
    until_s, before = time.monotonic() + STORED_S, -1.0
    while time.monotonic() < until_s:
        stored = float(client.info()["counters"]["stored_blocks_total"])
        if stored == before and stored > 0:
            return
        before = stored
        time.sleep(0.3)


def _forget(engine: str) -> str:
    """Empties the engine's own prefix cache; returns why it can't."""
    from hotkv_client.command import engines

    until_s = time.monotonic() + RESET_S
    while True:
        try:
            told, _ = engines.ask(engine, RESET, {}, proving.ANSWER_S)
        except ValueError as error:
            if "not JSON" in str(error):
                # Older vLLM answers with an empty body.
                return ""
            return (
                f"{engine} can't empty its own cache ({error}): start it with "
                "VLLM_SERVER_DEV_MODE=1, or name a second engine of the same model with --second"
            )
        if not isinstance(told, dict) or told.get("success", True):
            return ""
        if time.monotonic() > until_s:
            return (
                f"{engine} can't empty its own cache, because requests run: try again when it is "
                "idle, or name a second engine of the same model with --second"
            )
        time.sleep(0.2)


# -------------------------------------------------------------------------------------------- shown


def show(answer: Mapping[str, Any]) -> str:
    rows = [
        (
            one["name"],
            human_seconds(one["took_s"]),
            one["device_hit_token_count"],
            one["hit_token_count"] - one["device_hit_token_count"],
            one["engine"],
        )
        for one in answer["steps"]
    ]
    columns = ("prompt", "answer took", "tokens hit in the engine", "in hotkv", "engine")
    head = f"{answer['model']}, a new prompt of {answer['prompt_token_count']} tokens"
    return "\n".join([head, "", table(columns, rows), "", _verdict(answer)])


def _verdict(answer: Mapping[str, Any]) -> str:
    if answer["why_not"]:
        return f"not known yet whether hotkv hits: {answer['why_not']}"
    first, last = answer["steps"][0], answer["steps"][-1]
    found = last["hit_token_count"] - last["device_hit_token_count"]
    if not found:
        return (
            f"No: nothing came from hotkv (the engine says: {last['outcome']}); "
            "`hotkv doctor` and the engine's log say why"
        )
    compared = answer["compared"]
    saved = f"the hit took {human_seconds(last['took_s'])} for {human_seconds(first['took_s'])}"
    if compared["verdict"] == proving.DIFFERENT:
        return (
            f"No: {found} tokens came from hotkv, but the answer differs at token "
            f"{compared['position']}; `hotkv prove` compares it with a request without any cache"
        )
    equal = {
        proving.EQUAL: "all tokens are equal",
        proving.TIE: f"the tokens are equal up to a tie of logprobs at {compared['position']}",
    }[compared["verdict"]]
    return (
        f"Yes: {found} of {answer['prompt_token_count']} tokens came from hotkv, {equal}; {saved}"
    )
