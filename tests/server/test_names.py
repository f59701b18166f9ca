"""Tests the names of engines and models. Text and log show them in place of ids, JSON shows
both."""

import contextlib
import io
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from demo.processes import Server
from hotkv_client import RequestReport
from hotkv_client.command import cli
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.messages.fields import MAX_IDENTIFIER
from hotkv_server.node import names
from hotkv_server.node.names import NAMES_FILE, DisplayNames
from tests.server.places import Place, place, store
from tests.server.support import hashes, http_port

ID, ARCHITECTURE = "7f1c2a54-9a3e-4f0b-8f8e-0c8d1f7a2b11", "LlamaForCausalLM"
ENGINE, MODEL = "vllm-0", "llama-3.1-8b"
HTTP = ("--http.port", "0")
__all__ = ["place"]


def shown(target: str, *words: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main([*words, "--target", target]) == 0, words
    return printed.getvalue()


def connect(server: Server, name: str = ENGINE, **settings: str) -> PagedEngine:
    wanted = {"engine_id": ID, "model": ARCHITECTURE, **settings}
    named = {"engine_name": name, "model_names": [MODEL]} if name else {}
    return PagedEngine(server.target, **named, **wanted).connect()  # type: ignore[arg-type]


def use(engine: PagedEngine) -> str:
    """Stores and reports a prompt. Its first hash, in hexadecimal."""
    blocks = hashes(3)
    store(engine, blocks)
    engine.session.report_requests([RequestReport(blocks, 50, 0, 0, 0.0)], 0.0)
    engine.session.ping(10)
    return blocks[0].hex()


@pytest.fixture
def running(place: Place) -> Iterator[tuple[Server, str]]:
    """A server with a named engine, and the hash of one of its blocks."""
    server = place.start(*HTTP)
    place.engine = connect(server)
    yield server, use(place.engine)


def test_every_view_has_names_and_no_ids(running: tuple[Server, str]) -> None:
    server, block = running
    views = {
        ("status",): MODEL,
        ("sessions",): ENGINE,
        ("blocks",): MODEL,
        ("explain", block): MODEL,
        ("savings",): MODEL,
        ("savings", "--by", "engine"): ENGINE,
        ("top", "--count", "1", "--interval", "0.1"): ENGINE,
    }
    for words, name in views.items():
        text = shown(server.target, *words)
        assert name in text, words
        assert ID not in text and ARCHITECTURE not in text, words
    log = server.log.read_text()
    assert f"engine={ENGINE}" in log and f"model={MODEL}" in log
    assert ID not in log and ARCHITECTURE not in log


def test_json_and_the_page_have_names_and_ids(running: tuple[Server, str]) -> None:
    server, _ = running
    (session,) = json.loads(shown(server.target, "sessions", "--json"))
    row = json.loads(shown(server.target, "savings", "--by", "engine", "--json"))["rows"][0]
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port(server)}/api/v1/status") as answer:
        page = json.load(answer)
    for found in (session, row, page["sessions"][0], page["savings"]["hour"]["rows"][0]):
        assert (found["engine_name"], found["engine_id"]) == (ENGINE, ID)
        assert (found["model_name"], found["model"]) == (MODEL, ARCHITECTURE)


def test_engines_of_one_name_stay_distinct(place: Place) -> None:
    """The second one gets `#2`, and one without a name has its id; also after a restart."""
    server = place.start()
    with contextlib.ExitStack() as stack:
        for number, (name, model) in enumerate(((ENGINE, ARCHITECTURE),) * 2 + (("", "old"),)):
            engine = connect(server, name, engine_id=f"{ID}-{number}", model=model)
            stack.callback(engine.close)
            use(engine)
        rows = json.loads(shown(server.target, "sessions", "--json"))
        assert [row["engine_name"] for row in rows] == [ENGINE, f"{ENGINE}#2", f"{ID}-2"]
    place.stop(signal.SIGTERM)
    said = shown(place.start().target, "savings", "--by", "engine")
    assert f" {ENGINE} " in said and f"{ENGINE}#2" in said and f"{ID}-2" in said
    said = shown(place.server.target, "savings") if place.server else ""
    assert MODEL in said and "old" in said


# The class `DisplayNames`

SPACE = KeySpace(
    ARCHITECTURE, "w", "bfloat16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),), 16
)


def test_reconnecting_engine_keeps_its_name() -> None:
    book = DisplayNames()
    book.tell("a", ENGINE, MODEL, SPACE, [])
    book.tell("b", ENGINE, MODEL, SPACE, ["a"])
    assert (book.engine("a"), book.engine("b")) == (ENGINE, f"{ENGINE}#2")
    book.tell("b", ENGINE, MODEL, SPACE, ["a"])
    book.tell("b", ENGINE, MODEL, SPACE, [])
    assert book.engine("b") == f"{ENGINE}#2"
    book.tell("c", ENGINE, MODEL, SPACE, ["b"])
    assert book.engine("c") == ENGINE
    book.tell("d", f"{ENGINE}#2", MODEL, SPACE, ["b", "c"])
    assert book.engine("d") == f"{ENGINE}#2#2"
    book.tell("e", "f", "", SPACE, ["f"])
    assert book.engine("e") == "f#2" and book.engine("f") == "f", "an id is no other's name"


def test_a_worker_without_names_changes_none() -> None:
    book = DisplayNames()
    book.tell("a", ENGINE, MODEL, SPACE, [])
    book.tell("a", "", "", SPACE, ["a"])
    assert book.engine("a") == ENGINE and book.model_of(SPACE) == MODEL
    assert book.model("0" * names.DIGITS, ARCHITECTURE, "a") == MODEL
    assert book.model("0" * names.DIGITS, ARCHITECTURE) == ARCHITECTURE


def test_the_newest_and_longest_names_outlive_a_restart(tmp_path: Path) -> None:
    waiting: list[Callable[[], None]] = []
    book, longest = (
        DisplayNames(tmp_path, waiting.append),
        "\N{GRINNING FACE}" * (MAX_IDENTIFIER - 4),
    )
    ids = [f"{number:04}{longest}" for number in range(names.MAX_NAMES + 1)]
    for one in (*ids[:-1], ids[0], ids[-1]):
        space = replace(SPACE, model=f"model-{one[:4]}")
        book.tell(one, one[::-1], one, space, [])
    waiting[0]()
    again = DisplayNames(tmp_path)
    assert [again.engine(one)[::-1] for one in ids[2:]] == ids[2:] and again.model_of(space) == one
    assert again.engine(ids[0]) != ids[0] and again.engine(ids[1]) == ids[1], "it is the oldest"


NEWER = '{"format": 2, "engines": {}, "models": {}}'


@pytest.mark.parametrize(
    "text", ["pipe", "[" * 100_000, "", "[]", NEWER, '{"format": 1, "engines": {"a": 1}}']
)
def test_a_damaged_file_loses_names_and_nothing_else(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / NAMES_FILE
    os.mkfifo(path) if text == "pipe" else path.write_text(text)
    book = DisplayNames(tmp_path)
    assert book.engine("a") == "a" and "are lost" in caplog.text
    book.tell("a", ENGINE, MODEL, SPACE, [])
    assert DisplayNames(tmp_path).engine("a") == ENGINE
