"""Answers whether a request's answer depends on blocks that were loaded.

The server says what the request loaded. With the request's body, the engine computes its answer
twice, greedily: as it was sent, with hits, and with a random `cache_salt`, by which no block of any
cache hits. Tokens and logprobs are compared up to the first different token.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotkv_client.command.prompts import json_of, text_of
from hotkv_client.command.tables import human_seconds, table

if TYPE_CHECKING:
    from hotkv_client.admin import AdminClient

MAX_TOKENS = 256
"""Of an answer that is computed again; the body may ask for fewer."""
TOP = 5
ANSWER_S = 600.0
REPORT_S = 5.0
"""Wait for an engine's report of a request that it has answered."""
PAGE = 1000
SHOWN = 50
LEFT_OUT = (
    "stream", "stream_options", "best_of", "echo", "prompt_logprobs", "request_id",
    "logprob_token_ids", "max_completion_tokens", "min_tokens",
)  # fmt: skip
"""Fields that change what is answered beside the tokens, or that are set here."""
EQUAL, TIE, DIFFERENT = "equal", "tie", "different"


@dataclass(frozen=True, slots=True)
class Token:
    """top: logprobs of the most likely tokens here."""

    name: str
    logprob: float
    top: Mapping[str, float]


# ---------------------------------------------------------------------------------- what was loaded


def listed(client: "AdminClient", count: int) -> dict[str, Any]:
    return client.proof(page_size=count)


def found(client: "AdminClient", request_id: str) -> dict[str, Any]:
    """The request's record, with all its blocks. Raises ValueError without exactly one."""
    answer = client.proof(request_id, PAGE)
    rows = answer["requests"]
    if not rows:
        raise ValueError(
            f"no request is known as {request_id}: the server keeps the last "
            f"{answer['most_count']} since its start {_ago(answer['began_unix_time_ms'])} ago; "
            "without an id `hotkv prove` lists them"
        )
    if answer["request_count"] > 1:
        ids = ", ".join(row["request_id"] for row in rows[:5])
        raise ValueError(f"{answer['request_count']} requests begin with {request_id}: {ids}, …")
    (row,) = rows
    while len(row["blocks"]) < row["block_count"]:
        more = client.proof(row["request_id"], PAGE, len(row["blocks"]))["requests"]
        if len(more) != 1 or not more[0].get("blocks"):
            raise ValueError(f"the server has forgotten {row['request_id']} meanwhile")
        row["blocks"] += more[0]["blocks"]
    return dict(row)


# ---------------------------------------------------------------------------------- computing again


def proved(client: "AdminClient", engine: str, body: Path, noise: float) -> dict[str, Any]:
    """Compares the answer with hits and the one that is computed. Raises ValueError if the body or
    the engine does not allow that, OSError if the file can't be read."""
    path, asked = _greedy(body)
    name, salt = f"hotkv-prove-{os.urandom(8).hex()}", os.urandom(16).hex()
    as_sent = answer(engine, path, asked, f"{name}-1")
    afresh = answer(engine, path, {**asked, "cache_salt": salt}, f"{name}-2")
    again, control = reported(client, f"{name}-1"), reported(client, f"{name}-2")
    if control is not None and control["hit_token_count"]:
        raise ValueError(
            f"{control['hit_token_count']} tokens hit although the request had a random "
            "cache_salt, so this engine can't compute without a cache"
        )
    return {**compared(as_sent, afresh, noise), "again": again}


def compared(cached: list[Token], computed: list[Token], noise: float) -> dict[str, Any]:
    """verdict: `equal`; `tie`: at the first different token both are as likely, within `noise`;
    `different`. position: of the first difference, from 0. gap: how much less likely, in nats."""
    told: dict[str, Any] = {
        "verdict": EQUAL, "position": None, "token_count": 0, "gap": 0.0, "noise": noise,
        "largest_difference": 0.0, "cached": None, "computed": None,
    }  # fmt: skip

    def ended(verdict: str, gap: float) -> dict[str, Any]:
        at = told["token_count"]
        pair = [_shown(one[at]) if at < len(one) else None for one in (cached, computed)]
        given = {"verdict": verdict, "position": at, "cached": pair[0], "computed": pair[1]}
        return {**told, **given, "gap": gap if math.isfinite(gap) else None}

    for one, other in zip(cached, computed, strict=False):
        if one.name != other.name:
            gap = max(_gap(one, other.name), _gap(other, one.name))
            return ended(TIE if gap <= noise else DIFFERENT, gap)
        difference = abs(one.logprob - other.logprob)
        told["largest_difference"] = max(told["largest_difference"], difference)
        if not difference <= noise:
            return ended(DIFFERENT, difference)
        told["token_count"] += 1
    return told if len(cached) == len(computed) else ended(DIFFERENT, math.inf)


def _gap(chosen: Token, other: str) -> float:
    """How much likelier the chosen token is; infinite if the other is not among the likeliest."""
    return chosen.logprob - chosen.top.get(other, -math.inf)


def _shown(token: Token) -> dict[str, Any]:
    return {"token": token.name, "logprob": token.logprob}


def _greedy(path: Path) -> tuple[str, dict[str, Any]]:
    """Path of the API and the request, so that its answer has logprobs and no randomness."""
    body = json_of(text_of(path), str(path))
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise ValueError(
            f"{path}: give the request's body, with messages or prompt, as it was sent"
        )
    if body.get("use_beam_search"):
        raise ValueError(f"{path}: answers of a beam search have no logprobs to compare")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise ValueError(f"{path}: has {len(prompt)} prompts; give one")
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    most = min([MAX_TOKENS, *(one for one in limits if isinstance(one, int) and one > 0)])
    asked = {name: value for name, value in body.items() if name not in LEFT_OUT}
    asked |= {
        "temperature": 0, "n": 1, "stream": False, "max_tokens": most,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    if "messages" in body:
        return "v1/chat/completions", asked | {"logprobs": True, "top_logprobs": TOP}
    return "v1/completions", asked | {"logprobs": TOP}


def answer(engine: str, path: str, asked: Mapping[str, Any], name: str) -> list[Token]:
    from hotkv_client.command import engines  # Imports most of the time of a command.

    found, url = engines.ask(engine, path, asked, ANSWER_S, {"X-Request-Id": name})
    try:
        (choice,) = found["choices"]
        tokens = _tokens(choice["logprobs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{url}: the answer has no logprobs of one choice") from error
    if not tokens:
        raise ValueError(f"{url}: the answer has no token")
    return tokens


def _tokens(given: Mapping[str, Any]) -> list[Token]:
    if "content" in given:
        return [
            Token(
                one["token"],
                float(one["logprob"]),
                {top["token"]: float(top["logprob"]) for top in one["top_logprobs"]},
            )
            for one in given["content"]
        ]
    rows = zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True)
    return [
        Token(name, float(logprob), {key: float(value) for key, value in (top or {}).items()})
        for name, logprob, top in rows
    ]


def reported(client: "AdminClient", name: str) -> dict[str, Any] | None:
    """None if the engine has not reported the request to this server."""
    until_s = time.monotonic() + REPORT_S
    while True:
        rows = client.proof(name)["requests"]
        is_late = time.monotonic() >= until_s
        if rows and (is_late or rows[0]["outcome"] != "loading"):
            return found(client, rows[0]["request_id"])
        if is_late:
            return None
        time.sleep(0.05)


def same_blocks(record: Mapping[str, Any], again: Mapping[str, Any]) -> int:
    """How many blocks of the request were loaded again, with the same checksum."""
    keys = ("group_index", "hash_prefix", "checksum")
    first, second = (
        {tuple(block[key] for key in keys) for block in one["blocks"] if block["checksum"]}
        for one in (record, again)
    )
    return len(first & second)


# -------------------------------------------------------------------------------------------- shown


def show(answer: Mapping[str, Any]) -> str:
    parts = []
    if "requests" in answer:
        parts.append(_show_list(answer))
    if answer.get("request") is not None:
        parts.append(_show_request(answer["request"]))
    if answer.get("proof") is not None:
        parts.append(_show_proof(answer["proof"], answer.get("request")))
    return "\n\n".join(parts)


def _show_list(answer: Mapping[str, Any]) -> str:
    rows = [
        (
            row["request_id"] or "-",
            human_seconds(row["age_s"]),
            row["engine_name"],
            row["model_name"] or "-",
            row["prompt_token_count"],
            row["device_hit_token_count"],
            row["hit_token_count"] - row["device_hit_token_count"],
            row["outcome"],
        )
        for row in answer["requests"]
    ]
    if not rows:
        return "no engine has reported a request"
    columns = "request,ago,engine,model,tokens,on device,from hotkv,load"
    return table(columns.split(","), rows)


def _show_request(row: Mapping[str, Any]) -> str:
    head = (
        f"{row['request_id']}: {row['prompt_token_count']} tokens, "
        f"{row['device_hit_token_count']} hit in the engine's own cache, "
        f"{row['hit_token_count'] - row['device_hit_token_count']} in hotkv ({row['outcome']})"
    )
    blocks = row["blocks"]
    if not blocks:
        return f"{head}\nno block of hotkv is in this answer"
    counts = Counter(_origin(block) for block in blocks)
    lines = [head, *(f"{count} blocks {origin}" for origin, count in counts.most_common())]
    shown = [
        (
            block["group_index"],
            block["position"],
            block["hash_prefix"],
            block["tier"] or "-",
            _origin(block) if block["origin"] == "stored" else block["origin"],
            _ago(block["unix_time_ms"]) if block["unix_time_ms"] else "-",
            block["checksum"] or "none",
        )
        for block in blocks[:SHOWN]
    ]
    lines += ["", table(["group", "block", "hash", "tier", "origin", "ago", "checksum"], shown)]
    left = len(blocks) - len(shown) + row["omitted_block_count"]
    if left:
        kept = "; --json lists those that are kept" if len(blocks) > SHOWN else ""
        lines.append(f"and {left} more{kept}")
    return "\n".join(lines)


def _origin(block: Mapping[str, Any]) -> str:
    """In words that say what is not known."""
    if block["origin"] == "stored":
        return f"stored by {block['engine_name'] or 'an engine no longer known'}"
    return {
        "promoted": f"promoted from {block['tier']}, stored by an engine not known",
        "restored": "restored: from before the server's start, stored by an engine not known",
    }.get(block["origin"], "not known: had left the server before the request was reported")


def _show_proof(proof: Mapping[str, Any], record: Mapping[str, Any] | None) -> str:
    largest = f"logprobs differ by {proof['largest_difference']:.4f} at most"
    token = f"token {proof['position']}"
    if proof["verdict"] == EQUAL:
        said = f"equal: all {proof['token_count']} tokens; {largest}"
    elif proof["verdict"] == TIE:
        said = (
            f"a tie at {token}: {_pair(proof)}; both are as likely within {proof['gap']:.4f} "
            f"(noise: {proof['noise']:g}), and before it {largest}"
        )
    elif proof["cached"] is None or proof["computed"] is None:
        said = f"different at {token}: one of the answers ends there"
    else:
        said = f"different at {token}: {_pair(proof)}; noise would be {proof['noise']:g}"
    return "\n".join([said, *_covered(proof["again"], record)])


def _pair(proof: Mapping[str, Any]) -> str:
    one, other = proof["cached"], proof["computed"]
    return (
        f"with hits {one['token']} ({one['logprob']:.4f}), "
        f"computed {other['token']} ({other['logprob']:.4f})"
    )


def _covered(again: Mapping[str, Any] | None, record: Mapping[str, Any] | None) -> list[str]:
    """What the comparison covers."""
    if again is None:
        return ["the engine reported no request to this server: is it another server's?"]
    in_hotkv = again["hit_token_count"] - again["device_hit_token_count"]
    lines = [
        f"with hits: {again['device_hit_token_count']} tokens of {again['prompt_token_count']} in "
        f"the engine's own cache, {in_hotkv} in hotkv ({again['outcome']}); computed: none"
    ]
    if not again["hit_token_count"]:
        lines.append("nothing hit, so this says nothing of a cache")
    elif not in_hotkv:
        lines.append("no block of hotkv was loaded: this tests the engine's own cache alone")
    if record is None:
        return lines
    if record["prompt_token_count"] != again["prompt_token_count"]:
        lines.append(f"the request had {record['prompt_token_count']} tokens: another body?")
    same = same_blocks(record, again)
    lines.append(
        f"{same} of the request's {len(record['blocks'])} blocks were loaded again, with the same "
        "checksum"
    )
    return lines


def _ago(unix_time_ms: int) -> str:
    return human_seconds(max(0.0, time.time() - unix_time_ms / 1000))
