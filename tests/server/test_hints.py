"""Tests routers' hints on a real server, with requests or alone."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, GroupHashes, RequestReport, TransferStatus
from hotkv_client.admin import AdminClient
from hotkv_client.hints import HintClient
from hotkv_client.types import EndedRequest
from hotkv_proto import hints
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.hints import Action, ActionType, Hints, Target
from tests.server.places import load
from tests.server.support import FULL, PATIENT, WIDE, GroupsEngine, block_ids, hashes, number_of
from tests.support.waiting import wait_for

BLOCK_TOKENS = 16
ALL = Target()
LARGE = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, (256 << 10,))
SMALL_BLOCKS = (16 << 20) // LARGE.slot_bytes
PIN = {"action_type": "pin", "payload": {"ttl_s": 60}}
Make = Callable[..., "Chat"]


class Chat:
    def __init__(self, server: Server, *groups: Any) -> None:
        self.server = server
        self.model = os.urandom(6).hex()
        self.engine = GroupsEngine(server.target, groups or (FULL,), self.model)
        self.admin = AdminClient(server.target)

    def store(self, blocks: list[bytes]) -> list[bytes]:
        self.engine.store(BlockRun(0, blocks, block_ids(len(blocks))))
        return blocks

    def report(
        self,
        blocks: list[bytes],
        session_id: str = "",
        *actions: Action,
        hit: int = 0,
        device: int = 0,
        retention: Retention = NO_RETENTION,
        rejected: tuple[hints.Rejection, ...] = (),
        tokens_per_s: float = 0.0,
    ) -> str:
        """Reports a request. Of the first `hit` blocks, `device` hit in the engine's own cache.
        The message's id."""
        message_id = os.urandom(6).hex()
        report = RequestReport(
            blocks, len(blocks) * BLOCK_TOKENS, device * BLOCK_TOKENS, hit * BLOCK_TOKENS, 0.0,
            retention, session_id, Hints(message_id, actions, rejected),
        )  # fmt: skip
        self.engine.session.report_requests([report], tokens_per_s)
        self.engine.session.ping(10)
        return message_id

    def end(self, blocks: list[bytes], session_id: str, action: Action, message_id: str) -> None:
        ended = EndedRequest(blocks, session_id, Hints(message_id, (action,)))
        self.engine.session.report_requests([], 0.0, [ended])
        self.engine.session.ping(10)

    @property
    def key_space_id(self) -> int:
        return number_of(self.admin, self.model)

    def there(self, blocks: list[bytes]) -> Any:
        return self.engine.session.lookup([GroupHashes(0, blocks)]).result(60)[0]

    def in_memory(self, blocks: list[bytes]) -> Any:
        return self.engine.session.probe(0, blocks)

    def fill(self, num_blocks: int) -> None:
        """Stores new blocks until the server has evicted as many."""
        before = self.admin.info()["counters"]["evicted_blocks_total"]
        while self.admin.info()["counters"]["evicted_blocks_total"] < before + num_blocks:
            self.store(hashes(2))

    def pinned(self, group: int = 0) -> set[bytes]:
        listed = self.admin.blocks(self.key_space_id, 1000)["blocks"]
        pinned = [b for b in listed if b["pin_count"] and b["group_index"] == group]
        return {bytes.fromhex(b["block_hash"]) for b in pinned}

    def outcome(self, message_id: str) -> dict[str, Any]:
        with HintClient(self.server.target) as client:
            (only,) = client.outcomes(message_id)[0]
            return dict(only)

    def waits(self, message_id: str) -> bool:
        return bool(self.outcome(message_id)["status"] == "deferred")

    def send(
        self, action: dict[str, Any], of: list[bytes] | None = None, message_id: str = ""
    ) -> dict[str, Any]:
        """Sends an action without a request. Its outcome."""
        message_id = message_id or os.urandom(6).hex()
        envelope = {"message_id": message_id, "actions": [{"action_id": "a", **action}]}
        with HintClient(self.server.target) as client:
            (only,) = client.send(envelope, self.key_space_id if of else 0, of or ())
            return dict(only)

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
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def disk() -> Iterator[Server]:
    with runtime_folder(256 << 20) as folder:
        flags = ("--tiers.disk.path", str(folder / "disk"), "--tiers.disk.bytes", "64MiB")
        with Server(folder, "16MiB", *flags, *PATIENT) as running:
            running.wait_ready()
            yield running


def pin(target: Target = ALL, ttl_s: float = 60.0) -> Action:
    return Action("p", ActionType.PIN, target, 0, ttl_s)


# ------------------------------------------------------------------------------ with a request


def test_requested_pin_keeps_blocks_until_given_up(
    chat: Make,
) -> None:
    one = chat()
    prompt = one.store(hashes(5))
    message = one.report(prompt, "", pin(), retention=Retention(0, 60.0, pin=True))
    assert one.pinned() == set(prompt)
    outcome = one.outcome(message)
    assert (outcome["status"], outcome["done_block_count"]) == ("accepted", 5)
    # 0.1 ms is accepted too.
    short = one.report(prompt, "", pin(ttl_s=1e-4), retention=Retention(0, 1e-4, pin=True))
    assert one.outcome(short)["status"] == "accepted"
    given = one.send({"action_type": "demote", "payload": {"token_range": [32, None]}}, prompt)
    assert given["status"] == "accepted" and one.pinned() == set(prompt[:2])


@pytest.mark.parametrize("kind", ["demote", "retain", "pin"])
def test_a_block_that_is_named_twice_counts_once(chat: Make, small: Server, kind: str) -> None:
    one = chat(LARGE, at=small)
    prompt = one.store(hashes(2))
    payload = {} if kind == "demote" else {"ttl_s": 60}
    outcome = one.send({"action_type": kind, "payload": payload}, [*prompt, *prompt])
    assert (outcome["status"], outcome["done_block_count"]) == ("accepted", 2)
    assert one.pinned() == (set(prompt) if kind == "pin" else set())
    one.send({"action_type": "demote"}, [*prompt, *prompt])
    # The demoted blocks must go now.
    one.fill(4)
    assert not one.there(prompt).any()


def test_range_pins_blocks_holding_its_tokens(chat: Make) -> None:
    one, prompt = chat(FULL, WIDE), hashes(6)
    wide = prompt[1::2]
    one.engine.store(BlockRun(0, prompt, block_ids(6)), BlockRun(1, wide, block_ids(3)))
    one.report(prompt, "", pin(Target("", 17, 40)))
    assert one.pinned(0) == set(prompt[1:3]) and one.pinned(1) == set(wide[:2])
    for target, blocks, why in (
        (Target("", 96), prompt, "behind the last whole block"),
        (ALL, [], "shorter than a block"),
    ):
        outcome = one.outcome(one.report(blocks, "", pin(target)))
        assert outcome["status"] == "missing" and why in outcome["reason"]


def test_later_stored_blocks_are_kept_at_end(chat: Make) -> None:
    one, prompt, action = chat(), hashes(4), pin(Target("", 0, 48))
    message = one.report(prompt, "", action)
    assert one.waits(message)
    one.store(prompt)
    one.end(prompt, "", action, message)
    wait_for(lambda: one.outcome(message)["status"] == "accepted")
    assert one.pinned() == set(prompt[:3])


def test_rejections_of_the_engine_are_told(chat: Make) -> None:
    one = chat()
    message = one.report(hashes(2), rejected=(hints.Rejection("a", "explode", "no such type"),))
    outcome = one.outcome(message)
    told = (outcome["status"], outcome["reason"], outcome["action_type"])
    assert told == ("rejected", "no such type", "explode")


# ------------------------------------------------------------------------------------ sessions


def test_released_session_goes_first_shared_blocks_stay(chat: Make, small: Server) -> None:
    one = chat(LARGE, at=small)
    ended, other = f"{one.model} ended", f"{one.model} other"
    system, mine, theirs = hashes(4), hashes(6), hashes(6)
    one.report(one.store(system + mine), ended)
    one.report(one.store(system + theirs), other)
    # After so much use, only the release can make these blocks go.
    for _ in range(3):
        one.report(system + mine, ended, retention=Retention(3))
    release = Action("r", ActionType.RELEASE)
    message = one.report(system + mine, ended, release)
    assert one.waits(message) and one.outcome(message)["session_id"] == ended
    one.end(system + mine, ended, release, message)
    wait_for(lambda: not one.waits(message))
    outcome = one.outcome(message)
    assert (outcome["status"], outcome["done_block_count"]) == ("clipped", 6)
    assert "4 blocks are kept" in outcome["reason"]
    one.fill(len(mine))
    assert not one.there(mine).any() and one.there(system + theirs).all()
    missing = one.send({**PIN, "payload": {"ttl_s": 9, "session_id": ended}})
    assert missing["reason"] == "there is no session of this name"


# --------------------------------------------------------------------------- without a request


def test_envelope_with_hashes_runs_once_without_request(chat: Make) -> None:
    one = chat()
    prompt, message = one.store(hashes(4)), os.urandom(6).hex()
    held = one.admin.info()["counters"]["held_blocks_total"]
    action = {"action_type": "kv.pin", "action_version": "1.0", "payload": {"ttl_s": 60}}
    first, second = (one.send(action, prompt + hashes(1), message) for _ in range(2))
    assert first["status"] == "clipped" and "1 of the blocks are not there" in first["reason"]
    assert first["sequence"] == second["sequence"]
    assert one.admin.info()["counters"]["held_blocks_total"] == held + 4
    assert one.pinned() == set(prompt)
    assert "came without a request" in one.send({"action_type": "demote"})["reason"]


def test_prefetch_without_tier_says_what_is_there(chat: Make) -> None:
    one = chat()
    prompt = one.store(hashes(4))
    ask = {"action_type": "prefetch", "payload": {"deadline_s": 1}}
    assert one.send(ask, prompt)["status"] == "accepted"
    some = one.send(ask, prompt + hashes(2))
    assert (some["status"], some["done_block_count"], some["block_count"]) == ("clipped", 4, 6)
    assert one.send(ask, hashes(2))["status"] == "missing"


def test_a_foreign_key_space_is_unknown(chat: Make) -> None:
    one = chat()
    with HintClient(one.server.target, tenant="somebody else") as client:
        with pytest.raises(HotKVError) as caught:
            client.send({"actions": []}, one.key_space_id, hashes(1))
        assert caught.value.reason is Reason.UNKNOWN_KEY_SPACE


# --------------------------------------------------------------------------------- with a disk


def test_demotion_frees_memory_prefetch_returns_it(chat: Make, disk: Server) -> None:
    one, prompt = chat(at=disk), hashes(10)
    one.engine.memory[:] = os.urandom(len(one.engine.memory))
    one.store(prompt)
    wait_for(lambda: disk.counter("tier_demoted_blocks_total") == len(prompt))
    one.report(prompt, one.model)
    session = {"session_id": one.model}
    assert one.send({"action_type": "demote", "payload": session})["status"] == "accepted"
    assert not one.in_memory(prompt).any()
    ask = {"action_type": "prefetch", "payload": {**session, "deadline_s": 20}}
    message = one.send(ask)["message_id"]
    wait_for(lambda: not one.waits(message))
    outcome = one.outcome(message)
    assert (outcome["status"], outcome["done_block_count"]) == ("accepted", len(prompt))
    assert one.in_memory(prompt).all()
    # Each block is named twice. They leave host memory, but not the disk.
    given = one.send({"action_type": "demote"}, [*prompt, *prompt])
    assert given["done_block_count"] == len(prompt) and not one.in_memory(prompt).any()
    assert one.there(prompt).all() and load(one.engine, prompt, 20) is TransferStatus.DONE
    stored, num_bytes = one.engine.memory, FULL.slot_bytes
    assert stored[20 * num_bytes : 30 * num_bytes] == stored[: 10 * num_bytes]
    one.report(hashes(5), f"{one.model} lost")
    ask = {"action_type": "prefetch", "payload": {"session_id": f"{one.model} lost"}}
    message = one.send(ask)["message_id"]
    wait_for(lambda: one.outcome(message)["status"] == "missing")


# ------------------------------------------------------------------------------------- receipts


def test_a_session_has_a_receipt_of_its_requests(chat: Make) -> None:
    """After a release, the name gets a new receipt."""
    one = chat()
    prompt = one.store(hashes(8))
    message = one.report(prompt[:4], one.model, tokens_per_s=160.0)
    one.report(prompt, one.model, hit=4, device=1, tokens_per_s=1e-308)
    one.report(prompt, "", hit=8, tokens_per_s=160.0)
    one.end(prompt, one.model, Action("a", ActionType.RETAIN, ALL, 1), message)
    (found,) = one.admin.explain_session(one.model)
    assert (found["request_count"], found["prompt_token_count"]) == (2, 12 * BLOCK_TOKENS)
    assert (found["device_hit_token_count"], found["hit_token_count"]) == (16, 64)
    assert found["saved_s"] == pytest.approx(3 * BLOCK_TOKENS / 160.0)
    shown = one.server.cli("explain", "--session", one.model)
    assert "2 requests of 192 prompt tokens: 8.3% hit in the engine, 25.0% here, 0.30s" in shown
    one.send({"action_type": "release", "payload": {"session_id": one.model}})
    one.report(prompt, one.model)
    assert one.admin.explain_session(one.model)[0]["request_count"] == 1


def test_a_router_polls_what_has_changed(chat: Make) -> None:
    one = chat()
    prompt = one.store(hashes(3))
    with HintClient(one.server.target) as client:
        earlier = one.report(prompt, "", pin())
        _, cursor = client.outcomes(page_size=1000)
        first, second = (one.report(prompt, "", pin()) for _ in range(2))

        def changed() -> list[str]:
            """Only this test's: some earlier hints are done a second after their request."""
            nonlocal cursor
            rows, cursor = client.outcomes(cursor=cursor)
            found = [row["message_id"] for row in rows]
            return [name for name in found if name in (earlier, first, second)]

        assert changed() == [first, second]
        assert changed() == []
        # Of the three hits, the one on the device does not count.
        one.report(prompt, hit=3, device=1, tokens_per_s=160.0)
        rows = {row["message_id"]: row for row in client.outcomes(cursor=cursor)[0]}
        assert rows.keys() >= {first, second} and rows[first]["reused_block_count"] == 2
        assert rows[first]["saved_s"] == pytest.approx(2 * BLOCK_TOKENS / 160.0)


def test_the_command_line_shows_hints_and_sessions(chat: Make) -> None:
    one, prompt = chat(), hashes(3)
    one.store(prompt[:2])
    message = one.report(prompt, one.model, pin(Target(one.model)))
    shown = one.server.cli("hints", "--message", message)
    assert message in shown and "clipped" in shown and "2 of 3" in shown
    (answer,) = json.loads(one.server.cli("explain", "--session", one.model, "--json"))["sessions"]
    assert [block["tier"] for block in answer["key_spaces"][0]["blocks"]] == ["host", "host", ""]
    assert answer["outcomes"][0]["status"] == "clipped"
    number = answer["key_spaces"][0]["key_space_id"]
    for named, count in ((number, 1), (number + 1, 0)):
        words = ("--session", one.model, "--key-space", str(named), "--json")
        (found,) = json.loads(one.server.cli("explain", *words))["sessions"]
        assert len(found["key_spaces"]) == count
    assert "never stored" in one.server.cli("explain", "--session", one.model)
    assert "no request has named" in one.server.cli("explain", "--session", "nobody")
    one.send({"action_type": "release", "payload": {"session_id": one.model}})
    assert message in one.server.cli("explain", "--session", one.model)


# --------------------------------------------------------------------------------------- bounds


def test_one_tenants_flood_is_rejected_alone(chat: Make) -> None:
    one = chat()
    prompt, reasons = one.store(hashes(1)), set[str]()
    with HintClient(one.server.target, tenant="flood") as client:
        for number in range(20):
            actions = [{"action_id": f"{number}-{i}", "action_type": "demote"} for i in range(100)]
            rows = client.send({"message_id": f"flood {number}", "actions": actions})
            reasons |= {row["reason"] for row in rows}
        for part in ("too many actions", "actions has 100"):
            assert any(part in reason for reason in reasons), reasons
        assert len(client.outcomes(page_size=1000)[0]) <= 1000
    assert one.send(PIN, prompt)["status"] == "accepted"


def test_pins_beyond_the_share_are_clipped(chat: Make, small: Server) -> None:
    one = chat(LARGE, at=small)
    for _ in range(SMALL_BLOCKS // 4 // 6 + 2):
        outcome = one.send(PIN, one.store(hashes(6)))
        if outcome["status"] != "accepted":
            break
    assert outcome["status"] in ("clipped", "rejected") and "share" in outcome["reason"]
