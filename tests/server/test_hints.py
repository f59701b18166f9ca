"""Hints of routers at a real daemon: with requests and without, what they do to blocks, and what
has come of them."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, GroupHashes, RequestReport
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.hints import HintClient
from hotkv_client.types import EndedRequest
from hotkv_proto import hints
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.hints import Action, ActionType, Hints, Target
from hotkv_proto.v1 import hints_pb2, hints_pb2_grpc
from tests.server.support import FULL, WIDE, GroupsEngine, block_ids, hashes, number_of
from tests.support.waiting import wait_for

BLOCK_TOKENS = 16
ALL = Target()
LARGE = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, (256 << 10,))
SMALL_BLOCKS = (16 << 20) // LARGE.slot_bytes
Make = Callable[..., "Chat"]


class Chat:
    """An engine of its own model, and the requests that it reports."""

    def __init__(self, server: Server, *groups: Any) -> None:
        self.server = server
        self.model = os.urandom(6).hex()
        self.engine = GroupsEngine(server.target, groups or (FULL,), self.model)
        self.admin = AdminClient(server.target)

    def store(self, blocks: list[bytes]) -> None:
        self.engine.store(BlockRun(0, blocks, block_ids(len(blocks))))

    def prompt(self, num_blocks: int) -> list[bytes]:
        """Stores so many blocks; returns their hashes."""
        blocks = hashes(num_blocks)
        self.store(blocks)
        return blocks

    def report(
        self,
        blocks: list[bytes],
        session_id: str = "",
        *actions: Action,
        message_id: str = "",
        hit: int = 0,
        retention: Retention = NO_RETENTION,
        rejected: tuple[hints.Rejection, ...] = (),
        tokens_per_s: float = 0.0,
    ) -> None:
        """A request was scheduled; its first `hit` blocks were loaded."""
        report = RequestReport(
            blocks, len(blocks) * BLOCK_TOKENS, 0, hit * BLOCK_TOKENS, 0.0, retention, session_id,
            Hints(message_id, actions, rejected),
        )  # fmt: skip
        self.engine.session.report_requests([report], tokens_per_s)
        self.engine.session.ping(10)

    def end(
        self, blocks: list[bytes], session_id: str, *actions: Action, message_id: str = ""
    ) -> None:
        """A request has ended."""
        ended = EndedRequest(blocks, session_id, Hints(message_id, actions))
        self.engine.session.report_requests([], 0.0, [ended])
        self.engine.session.ping(10)

    @property
    def key_space_id(self) -> int:
        return number_of(self.admin, self.model)

    def blocks(self) -> dict[bytes, dict[str, Any]]:
        listed = self.admin.blocks(self.key_space_id, 1000)["blocks"]
        return {bytes.fromhex(b["block_hash"]): b for b in listed}

    def there(self, blocks: list[bytes]) -> Any:
        """Which of the blocks a lookup finds."""
        return self.engine.session.lookup([GroupHashes(0, blocks)]).result(60)[0]

    def fill(self, num_blocks: int) -> None:
        """Stores other blocks until so many were evicted, two at a time."""
        before = self.admin.info()["counters"]["evicted_blocks_total"]
        while self.admin.info()["counters"]["evicted_blocks_total"] < before + num_blocks:
            self.store(hashes(2))

    def pinned(self) -> set[bytes]:
        return {block for block, b in self.blocks().items() if b["pin_count"]}

    def outcomes(self, message_id: str) -> dict[str, dict[str, Any]]:
        with HintClient(self.server.target) as client:
            return {one["action_id"]: one for one in client.outcomes(message_id)[0]}

    def send(
        self, *actions: dict[str, Any], message_id: str = "", of: list[bytes] | None = None
    ) -> dict[str, Any]:
        """Sends an envelope without a request, on the blocks `of`; the outcome of its first
        action."""
        envelope = {
            "protocol_version": "0.1",
            "message_id": message_id or os.urandom(6).hex(),
            "actions": [{"action_id": str(i), **one} for i, one in enumerate(actions)],
        }
        with HintClient(self.server.target) as client:
            return client.send(envelope, self.key_space_id if of else 0, of or ())[0]

    def close(self) -> None:
        self.engine.close()
        self.admin.__exit__(None, None, None)


@pytest.fixture
def chat(server: Server) -> Iterator[Make]:
    made: list[Chat] = []

    def make(*groups: Any, at: Server = server) -> Chat:
        made.append(Chat(at, *groups))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server with room for few large blocks."""
    with (
        runtime_folder(64 << 20) as folder,
        Server(folder, "16MiB", "--arena.slab-bytes", "256KiB") as running,
    ):
        running.wait_ready()
        yield running


def named(tag: str) -> str:
    return f"{tag}-{os.urandom(4).hex()}"


def pin(action_id: str = "p", target: Target = ALL, ttl_s: float = 60.0) -> Action:
    return Action(action_id, ActionType.PIN, target, 0, ttl_s)


# ------------------------------------------------------------------------------ with a request


def test_a_pin_that_comes_with_a_request_keeps_its_blocks(chat: Make) -> None:
    one = chat()
    prompt = one.prompt(5)
    message = named("pin")
    one.report(prompt, "", pin(), message_id=message, retention=Retention(0, 60.0, pin=True))
    assert one.pinned() == set(prompt)
    outcome = one.outcomes(message)["p"]
    assert (outcome["status"], outcome["done_block_count"]) == ("accepted", 5)
    # A moment is long enough.
    message, short = named("short"), Retention(0, 1e-4, pin=True)
    one.report(prompt, "", pin(ttl_s=1e-4), message_id=message, retention=short)
    assert one.outcomes(message)["p"]["status"] == "accepted"


def test_what_is_given_up_is_pinned_no_more(chat: Make) -> None:
    one = chat()
    prompt = one.prompt(4)
    one.report(prompt, "", pin(), message_id=named("pin"))
    assert one.pinned() == set(prompt)
    outcome = one.send({"action_type": "demote", "payload": {"token_range": [32, None]}}, of=prompt)
    assert outcome["status"] == "accepted" and one.pinned() == set(prompt[:2])


@pytest.mark.parametrize("kind", ["demote", "retain", "pin"])
def test_a_block_that_is_named_twice_counts_once(chat: Make, small: Server, kind: str) -> None:
    one = chat(LARGE, at=small)
    prompt = one.prompt(2)
    outcome = one.send(
        {"action_type": kind, "payload": {} if kind == "demote" else {"ttl_s": 60}},
        of=[*prompt, *prompt],
    )
    assert (outcome["status"], outcome["done_block_count"]) == ("accepted", 2)
    assert one.pinned() == (set(prompt) if kind == "pin" else set())
    one.send({"action_type": "demote"}, of=[*prompt, *prompt])
    # What is stored next needs the room of both.
    one.fill(4)
    assert not one.there(prompt).any()


def test_a_range_pins_the_blocks_that_have_its_tokens(chat: Make) -> None:
    one = chat()
    prompt = one.prompt(6)
    message = named("range")
    one.report(prompt, "", pin(target=Target("", 17, 40)), message_id=message)
    assert one.pinned() == set(prompt[1:3])
    one.report(prompt, "", pin(target=Target("", 96)), message_id=message + "b")
    assert one.outcomes(message + "b")["p"]["status"] == "missing"


def test_ranges_of_groups_with_other_blocks(chat: Make) -> None:
    one, prompt = chat(FULL, WIDE), hashes(6)
    wide = prompt[1::2]
    one.engine.store(BlockRun(0, prompt, block_ids(6)), BlockRun(1, wide, block_ids(3)))
    one.report(prompt, "", pin(target=Target("", 16, 48)), message_id=named("wide"))
    pinned = {
        (b["group_index"], bytes.fromhex(b["block_hash"]))
        for b in one.admin.blocks(one.key_space_id, 1000)["blocks"]
        if b["pin_count"]
    }
    assert pinned == {(0, prompt[1]), (0, prompt[2]), (1, wide[0]), (1, wide[1])}


def test_blocks_that_are_stored_later_are_kept_at_the_end_of_the_request(chat: Make) -> None:
    one, prompt = chat(), hashes(4)
    message, action = named("late"), pin(target=Target("", 0, 48))
    one.report(prompt, "", action, message_id=message)
    assert one.outcomes(message)["p"]["status"] == "deferred"
    one.store(prompt)
    one.end(prompt, "", action, message_id=message)
    wait_for(lambda: one.outcomes(message)["p"]["status"] == "accepted")
    assert one.pinned() == set(prompt[:3])


def test_rejections_of_the_engine_are_told(chat: Make) -> None:
    one, message = chat(), named("rejected")
    one.report(
        hashes(2), message_id=message, rejected=(hints.Rejection("a", "explode", "no such type"),)
    )
    outcome = one.outcomes(message)["a"]
    assert (outcome["status"], outcome["reason"]) == ("rejected", "no such type")
    assert outcome["action_type"] == "explode"


# ------------------------------------------------------------------------------------ sessions


def test_a_session_is_its_latest_prompt(chat: Make) -> None:
    one, session = chat(), named("session")
    first, second = hashes(3), hashes(5)
    one.store(first)
    one.store(second)
    one.report(first, session)
    one.report(second, session)
    outcome = one.send({"action_type": "pin", "payload": {"ttl_s": 60, "session_id": session}})
    assert outcome["status"] == "accepted" and one.pinned() == set(second)


def test_a_released_session_goes_first_and_what_others_share_stays(
    chat: Make, small: Server
) -> None:
    one = chat(LARGE, at=small)
    ended, other = named("ended"), named("other")
    system, mine, theirs = hashes(4), hashes(6), hashes(6)
    one.store(system + mine)
    one.store(system + theirs)
    one.report(system + mine, ended)
    one.report(system + theirs, other)
    # Used last, and often: nothing but the release makes these blocks go.
    for _ in range(3):
        one.report(system + mine, ended, retention=Retention(3))
    message = named("release")
    release = Action("r", ActionType.RELEASE)
    one.report(system + mine, ended, release, message_id=message)
    waiting = one.outcomes(message)["r"]
    assert (waiting["status"], waiting["session_id"]) == ("deferred", ended)
    one.end(system + mine, ended, release, message_id=message)
    wait_for(lambda: one.outcomes(message)["r"]["status"] == "clipped")
    outcome = one.outcomes(message)["r"]
    assert outcome["done_block_count"] == 6 and "4 blocks are kept" in outcome["reason"]
    one.fill(len(mine))
    assert not one.there(mine).any() and one.there(system + theirs).all()
    missing = one.send({"action_type": "pin", "payload": {"ttl_s": 9, "session_id": ended}})
    assert missing["status"] == "missing"


def test_a_session_that_goes_on_is_not_released(chat: Make) -> None:
    one, session = chat(), named("on")
    prompt = one.prompt(3)
    message, release = named("release"), Action("r", ActionType.RELEASE)
    one.report(prompt, session, release, message_id=message)
    one.end(prompt, session, release, message_id=message)
    one.report(prompt, session)
    wait_for(lambda: one.outcomes(message)["r"]["status"] == "rejected")
    assert "gone on" in one.outcomes(message)["r"]["reason"]
    assert one.send({"action_type": "demote", "payload": {"session_id": session}})["status"] == (
        "accepted"
    )


# --------------------------------------------------------------------------- without a request


def test_an_envelope_with_hashes_needs_no_request(chat: Make) -> None:
    one = chat()
    prompt = one.prompt(4)
    outcome = one.send(
        {"action_type": "kv.pin", "action_version": "1.0", "payload": {"ttl_s": 60}},
        of=prompt + hashes(1),
    )
    assert outcome["status"] == "clipped" and "1 of the blocks are not there" in outcome["reason"]
    assert one.pinned() == set(prompt)
    assert one.send({"action_type": "demote"})["status"] == "missing"


def test_a_prefetch_without_a_tier_says_what_is_there(chat: Make) -> None:
    one = chat()
    prompt = one.prompt(4)
    ask = {"action_type": "prefetch", "payload": {"deadline_s": 1}}
    assert one.send(ask, of=prompt)["status"] == "accepted"
    some = one.send(ask, of=prompt + hashes(2))
    assert (some["status"], some["done_block_count"], some["block_count"]) == ("clipped", 4, 6)
    assert one.send(ask, of=hashes(2))["status"] == "missing"


def test_an_action_is_done_once(chat: Make) -> None:
    one = chat()
    prompt = one.prompt(3)
    held = one.admin.info()["counters"]["held_blocks_total"]
    message = named("twice")
    ask = {"action_type": "pin", "payload": {"ttl_s": 60}}
    answers = [one.send(ask, message_id=message, of=prompt) for _ in range(2)]
    assert answers[0]["sequence"] == answers[1]["sequence"]
    assert one.admin.info()["counters"]["held_blocks_total"] == held + 3


def test_bad_actions_are_rejected_alone(chat: Make) -> None:
    one = chat()
    prompt = one.prompt(2)
    envelope = {
        "message_id": named("mixed"),
        "actions": [
            {"action_id": "a", "action_type": "explode"},
            {"action_id": "b", "action_type": "retain", "payload": {"priority": "high"}},
            {"action_id": "c", "action_type": "retain", "payload": {"priority": 2, "ttl_s": 1e12}},
        ],
    }
    with HintClient(one.server.target) as client:
        rows = client.send(envelope, one.key_space_id, prompt)
    by_id = {row["action_id"]: row for row in rows}
    assert {key: row["status"] for key, row in by_id.items()} == {
        "a": "rejected",
        "b": "rejected",
        "c": "clipped",
    }
    assert "payload.priority" in by_id["b"]["reason"] and "86400" in by_id["c"]["reason"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 60_000, '{"actions": 5}', json.dumps({"odd": "x" * 70_000})]
)
def test_what_is_no_envelope_changes_nothing(chat: Make, text: str) -> None:
    with grpc.insecure_channel(chat().server.target) as channel:
        stub: Any = hints_pb2_grpc.HintServiceStub(channel)
        try:
            answer = stub.SendHints(hints_pb2.SendHintsRequest(kv_hints=text), timeout=10)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        else:
            assert [one.status for one in answer.outcomes] == [hints_pb2.HINT_STATUS_REJECTED]


def test_a_foreign_key_space_is_unknown(chat: Make) -> None:
    one = chat()
    with (
        HintClient(one.server.target, tenant="somebody else") as client,
        pytest.raises(HotKVError) as caught,
    ):
        client.send({"actions": []}, one.key_space_id, hashes(1))
    assert caught.value.reason is Reason.UNKNOWN_KEY_SPACE


# ------------------------------------------------------------------------------------- receipts


def test_a_receipt_says_what_was_used_again_and_what_it_saved(chat: Make) -> None:
    one, message = chat(), named("paid")
    prompt = one.prompt(8)
    one.report(prompt, "", pin(target=Target("", 32)), message_id=message)
    assert one.outcomes(message)["p"]["reused_block_count"] == 0
    for _ in range(2):
        one.report(prompt[:5] + hashes(2), hit=5, tokens_per_s=160.0)
    outcome = one.outcomes(message)["p"]
    assert outcome["reused_block_count"] == 3
    assert outcome["saved_s"] == pytest.approx(3 * BLOCK_TOKENS / 160.0)


def test_a_router_polls_what_has_changed(chat: Make) -> None:
    one = chat()
    prompt = one.prompt(3)
    with HintClient(one.server.target) as client:
        _, cursor = client.outcomes(page_size=1000)
        first, second = named("first"), named("second")
        for message in (first, second):
            one.report(prompt, "", pin(), message_id=message)
        changed, cursor = client.outcomes(cursor=cursor)
        assert [row["message_id"] for row in changed] == [first, second]
        assert client.outcomes(cursor=cursor) == ([], cursor)
        one.report(prompt, hit=3)
        assert {row["message_id"] for row in client.outcomes(cursor=cursor)[0]} >= {first, second}


def test_the_command_line_shows_hints_and_sessions(
    chat: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one, session, prompt = chat(), named("shown"), hashes(3)
    one.store(prompt[:2])
    message = named("cli")
    one.report(prompt, session, pin(target=Target(session)), message_id=message)
    target = ("--target", one.server.target)
    assert cli.main([*target, "hints", "--message", message]) == 0
    shown = capsys.readouterr().out
    assert message in shown and "clipped" in shown and "2 of 3" in shown
    assert cli.main([*target, "explain", "--session", session]) == 0
    shown = capsys.readouterr().out
    assert "ready" in shown and "never stored" in shown and "pin" in shown
    assert cli.main([*target, "--json", "explain", "--session", session]) == 0
    answer = json.loads(capsys.readouterr().out)["sessions"]
    assert [block["tier"] for block in answer[0]["key_spaces"][0]["blocks"]] == ["host", "host", ""]
    assert answer[0]["outcomes"][0]["status"] == "clipped"
    assert cli.main([*target, "explain", "--session", "nobody"]) == 0
    assert "no request has named" in capsys.readouterr().out
    assert cli.main([*target, "--json", "hints"]) == 0
    assert message in capsys.readouterr().out


# --------------------------------------------------------------------------------------- bounds


def test_a_flood_of_one_tenant_is_rejected_and_others_are_served(chat: Make) -> None:
    one = chat()
    prompt = one.prompt(1)
    statuses: set[str] = set()
    with HintClient(one.server.target, tenant="flood") as client:
        for number in range(20):
            actions = [{"action_id": f"{number}-{i}", "action_type": "demote"} for i in range(100)]
            rows = client.send({"message_id": named("flood"), "actions": actions})
            statuses |= {row["reason"].split(";")[0][:20] for row in rows}
        assert any("too many actions" in reason for reason in statuses), statuses
        assert any("actions has 100" in reason for reason in statuses), statuses
        assert len(client.outcomes(page_size=1000)[0]) <= 1000
    outcome = one.send({"action_type": "pin", "payload": {"ttl_s": 5}}, of=prompt)
    assert outcome["status"] == "accepted"


def test_pins_beyond_the_share_are_clipped(chat: Make, small: Server) -> None:
    one = chat(LARGE, at=small)
    room = SMALL_BLOCKS // 4
    for _ in range(room // 6 + 2):
        prompt = hashes(6)
        one.store(prompt)
        outcome = one.send({"action_type": "pin", "payload": {"ttl_s": 60}}, of=prompt)
        if outcome["status"] != "accepted":
            break
    assert outcome["status"] in ("clipped", "rejected") and "share" in outcome["reason"]


def test_reports_and_hints_survive_what_no_engine_sends(chat: Make) -> None:
    one = chat()
    for action in (pin("x" * 500), pin(target=Target("\n")), pin(ttl_s=0.0)):
        one.report(hashes(1), "", action, message_id=named("odd"))
    one.report(hashes(1), "s" * 500)
    assert one.admin.info()["state"].startswith("ready")
