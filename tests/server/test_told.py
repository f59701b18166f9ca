"""Topics: docs/told.md names each with its filters and fields, and a question that can't be meant
is refused in words."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.node.capability import Topic, tell
from hotkv_server.settings import Settings
from hotkv_server.startup.capabilities import attach_all
from hotkv_server.told.kernel import all_topics
from tests.server.nodes import local_node
from tools.metrics_reference import NoCopies

PAGE = Path(__file__).resolve().parents[2] / "docs" / "told.md"
ROW = re.compile(r"^\| `(\w+)` \|(.*?)\|(.*)\|$", re.MULTILINE)


@pytest.fixture
def topics(tmp_path: Path) -> Iterator[dict[str, Topic]]:
    copies: Any = NoCopies()
    with local_node(tmp_path, copies=copies) as node:
        attach_all(Settings.model_validate({"arena": {"dir": tmp_path}}), node)
        yield all_topics(node)


def told(topics: dict[str, Topic], name: str, **filters: str) -> dict[str, Any]:
    return asyncio.run(tell(topics, name, filters))


def test_the_page_has_every_topic_with_its_filters_and_fields(topics: dict[str, Topic]) -> None:
    rows = {name: (filters, fields) for name, filters, fields in ROW.findall(PAGE.read_text())}
    listed = {
        name: [one for one in re.findall(r"`(\w+)`", filters) if one != "no"]
        for name, (filters, _) in rows.items()
    }
    assert listed == told(topics, "")["topics"]
    for name in topics:
        answer = told(topics, name)
        orjson.dumps(answer)
        missing = [field for field in answer if f"`{field}`" not in rows[name][1]]
        assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize(
    ("name", "filters", "words"),
    [
        ("secrets", {}, "this server tells of"),
        ("sessions", {"page_size": "1"}, "sessions heeds none"),
        ("blocks", {"page_size": "-1"}, "page_size is '-1'"),
        ("blocks", {"page_size": "²"}, "page_size is '²'"),
        ("blocks", {"page_size": "9" * 30}, "page_size is"),
        ("blocks", {"page_token": "x"}, "page_token"),
        ("savings", {"since_s": "inf"}, "since_s is 'inf'"),
        ("savings", {"since_s": "-1"}, "since_s is '-1'"),
    ],
)
def test_questions_that_cannot_be_meant(
    topics: dict[str, Topic], name: str, filters: dict[str, str], words: str
) -> None:
    with pytest.raises(HotKVError, match=re.escape(words)) as raised:
        told(topics, name, **filters)
    assert raised.value.reason is Reason.INVALID_FIELD
