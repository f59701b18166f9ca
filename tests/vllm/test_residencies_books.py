"""The scheduler's books of requests that live in host memory, over a double of the server: who may
begin, what workers hear, and how a request that can't go on ends. No engine; time is what the test
says."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotkv_client.types import BlockResult, ResidencyOpened, ResidentBlocks
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.residency.calls import ASK_AGAIN_S, TURN_S, ResidencyCalls
from hotkv_vllm.residency.moves import Demand, Relief
from hotkv_vllm.residency.resident_requests import (
    PARK_S,
    QUANTUM_TOKENS,
    ResidentRequests,
)
from hotkv_vllm.residency.step import ResidentStep
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.scheduler.stores import StorePlanner
from hotkv_vllm.sparse.sequences import StreamCount
from tests.vllm.parts import TOKENS, Parts, block_hash, report, request

TIMEOUT_S = 30.0
LONG = 8 * TOKENS


class Pool:
    """Stands for the device's pool. `running`: requests that have blocks. `more`: how many a
    request may add to its prompt. `whole`: requests that stay on the device as a whole. `asked`:
    what the coming step asks of it."""

    def __init__(self) -> None:
        self.more = 4
        self.in_flight: set[str] = set()
        self.running: set[str] = set()
        self.failed: dict[str, str] = {}
        self.losing: list[str] = []
        self.has_lost = False
        self.freed: dict[str, int] = {}
        self.whole: set[str] = set()
        self.has_room = False
        self.asked: Demand | None = None

    def stays_whole(self, one: Any) -> bool:
        return one.request_id in self.whole

    def has_room_for(self, one: Any) -> bool:
        return self.has_room and self.stays_whole(one)

    def demand(self, has_room: Any) -> Demand | None:
        return self.asked

    def running_requests(self) -> list[str]:
        return sorted(self.running)

    def relief(self, request_id: str, stored_tokens: int) -> Relief | None:
        return Relief(stored_tokens // TOKENS - 2) if request_id in self.whole else None

    def move(self, request_id: str) -> None:
        self.whole.remove(request_id)

    def forget(self, request_id: str) -> None:
        self.whole.discard(request_id)

    def longest(self, one: Any) -> int:
        return int(one.num_prompt_tokens) + self.more * TOKENS

    def holds_whole(self, one: Any) -> bool:
        return self.longest(one) <= 8 * TOKENS

    def has_blocks(self, request_id: str) -> bool:
        return request_id in self.running

    def is_in_flight(self, request_id: str) -> bool:
        return request_id in self.in_flight

    def fail(self, request_id: str, why: str) -> None:
        self.failed[request_id] = why

    def lose(self, request_id: str) -> None:
        self.losing.append(request_id)

    def hot_blocks(self, request_id: str) -> tuple[int, ...]:
        return (90, 91)

    def num_freed(self, request_id: str) -> int:
        return self.freed.get(request_id, 0)


class Books:
    """Residencies over the double. `stored`: blocks of a request that the server has."""

    def __init__(self, **parts: Any) -> None:
        self.parts = Parts(**parts)
        self.pool = Pool()
        self.streams = StreamCount(lambda state, why: None)
        session = self.parts.session
        object.__setattr__(session.config, "on_state", self.streams)
        self.reservations = ResidencyCalls(session, self.streams, self.parts.stats)
        self.books = ResidentRequests(
            self.reservations,
            self.parts.groups,
            self.parts.exactness,
            self.pool,  # type: ignore[arg-type]
            self.parts.stats,
            TIMEOUT_S,
        )
        self.now_s = 100.0
        self.requests: dict[str, Any] = {}

    @property
    def server(self) -> Any:
        return self.parts.server

    def arrive(self, name: str) -> RequestState:
        state = self.parts.state(request(name, LONG))
        self.requests[name] = state.request
        self.books.arrived(state, self.now_s)
        return state

    def run(self, name: str = "a") -> RequestState:
        """Returns a request that was admitted and runs."""
        state = self.arrive(name)
        assert self.books.is_admitted(state, self.now_s)
        self.pool.running.add(name)
        return state

    def keep(self, state: RequestState, blocks: int) -> None:
        """So many of its blocks are computed, stored, and known to be kept."""
        name = state.request.request_id
        state.request.num_computed_tokens = blocks * TOKENS
        for block, key in enumerate(self.books.names(state, blocks)):
            assert key == block_hash(name, block)
            self.server.blocks[self.parts.space, 0, key] = {0: b"x"}
        state.store.stored_blocks[0] = blocks
        for _ in range(2):
            self.step(name)
        assert self.books.kept_tokens(name) == blocks * TOKENS

    def step(self, *names: str, preempted: Any = (), passed_s: float = 0.0) -> ResidentStep:
        """Returns a step of these requests, one token each."""
        self.now_s += passed_s
        output = SimpleNamespace(
            preempted_req_ids=set(preempted),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda _: (list(range(1, 1000)),)
            ),
        )
        self.pool.running -= set(preempted)
        rows: Any = SimpleNamespace(request=self.requests.get)
        return self.books.step(output, rows, self.now_s)

    def refuse(self, reason: Reason) -> None:
        def add(*_: Any) -> Any:
            raise HotKVError(reason, "told to refuse")

        self.server.residencies.add = add


def test_a_request_that_was_kept_is_told_to_the_workers_once() -> None:
    books = Books()
    books.keep(books.run(), 3)
    (row,) = books.step("a").rows
    assert row.may_outgrow and not row.kept and row.pin is None
    assert books.books.is_resident("a") and not books.pool.failed


@pytest.mark.parametrize("reason", [Reason.RESIDENCY_TOO_LARGE, Reason.NOT_ALLOWED])
def test_a_refusal_that_will_never_change_ends_the_request(reason: Reason) -> None:
    books = Books()
    books.refuse(reason)
    state = books.arrive("a")
    assert not books.books.is_admitted(state, books.now_s)
    books.step()
    books.step()
    assert "told to refuse" in books.pool.failed["a"]
    assert books.parts.count("failed_residencies") == 1


def test_who_has_waited_for_long_comes_before_who_came_later() -> None:
    books = Books()
    books.server.residencies.most = 0
    first = books.arrive("a")
    books.step(passed_s=ASK_AGAIN_S)
    assert not books.books.is_admitted(first, books.now_s)
    books.step(passed_s=TURN_S + 0.5)
    second = books.arrive("b")
    asked = books.server.count("open_residency")
    books.server.residencies.most = 1
    assert not books.books.is_admitted(second, books.now_s)
    assert books.server.count("open_residency") == asked
    for state in (first, second):
        for _ in range(3):
            books.now_s += 2 * ASK_AGAIN_S
            admitted = books.books.is_admitted(state, books.now_s)
        assert admitted == (state is first)


# ---------------------------------------------------------------------------------- room that grows

QUANTUM = QUANTUM_TOKENS // TOKENS


def growing(most_blocks: int | None = None) -> Books:
    """Returns books of requests with a large `max_tokens`, over a server of so many blocks."""
    books = Books()
    books.pool.more = 20 * QUANTUM
    books.server.residencies.most_blocks = most_blocks
    return books


def decoded(books: Books, state: RequestState, blocks: int) -> None:
    """The request has filled so many blocks and decodes on; the server has them all."""
    name, one = state.request.request_id, state.request
    one.num_computed_tokens, one.num_tokens = blocks * TOKENS, blocks * TOKENS + 1
    one.block_hashes = [block_hash(name, number) for number in range(blocks)]
    for key in books.books.names(state, blocks):
        books.server.blocks[books.parts.space, 0, key] = {0: b"x"}
    state.store.stored_blocks[0] = blocks


def room(books: Books, name: str) -> int:
    residency = books.server.residencies.open["engine", books.books.residency_of(name)]
    return int(residency.asked[0])


def test_room_is_reserved_for_what_a_request_has_and_grows_with_it() -> None:
    books = growing()
    state = books.run()
    assert room(books, "a") == LONG // TOKENS + QUANTUM
    for blocks in range(8, 8 + 3 * QUANTUM):
        decoded(books, state, blocks)
        books.step("a", passed_s=1.0)
        assert books.books.held(books.now_s) == []
        needed = blocks + 1
        assert needed <= room(books, "a") <= needed + QUANTUM
    books.step("a")
    assert books.books.kept_tokens("a") == blocks * TOKENS and not books.pool.failed
    decoded(books, state, 8 + 20 * QUANTUM - 1)
    for _ in range(3):
        books.step("a", passed_s=1.0)
    assert room(books, "a") == 8 + 20 * QUANTUM, "no more than it may ever have"


def test_a_server_that_does_not_grow_is_asked_for_all_room_at_once() -> None:
    books = growing()
    books.server.residencies.can_grow = False
    state = books.run()
    assert room(books, "a") == 8 + 20 * QUANTUM
    decoded(books, state, 19 * QUANTUM)
    books.step("a", passed_s=2.0)
    assert books.books.held(books.now_s) == [] and books.server.count("open_residency") == 1


def test_a_request_without_room_is_held_while_others_go_on() -> None:
    books = growing(2 * (8 + QUANTUM))
    first, _ = books.run("a"), books.run("b")
    full = 8 + QUANTUM
    decoded(books, first, full)
    for _ in range(50):
        assert books.books.held(books.now_s) == ["a"]
        books.step("b", passed_s=1.0)
    assert not books.pool.losing and not books.pool.failed, "it waits as long as another runs"
    late = books.arrive("c")
    assert not books.books.is_admitted(late, books.now_s), "those that run come first"
    books.pool.running.remove("b")
    books.books.ended("b")
    for _ in range(2):
        books.books.held(books.now_s)
        books.step("a", passed_s=2 * ASK_AGAIN_S)
    assert books.books.held(books.now_s) == [] and room(books, "a") > full
    assert not books.books.is_admitted(late, books.now_s), "it has not enough for a quantum"
    books.pool.running.remove("a")
    books.books.ended("a")
    for _ in range(2):
        books.step(passed_s=2 * ASK_AGAIN_S)
    assert books.books.is_admitted(late, books.now_s)


def test_a_held_request_goes_on_with_a_single_block() -> None:
    books = growing(8 + QUANTUM + 1)
    state = books.run()
    decoded(books, state, 8 + QUANTUM)
    for _ in range(2):
        books.books.held(books.now_s)
        books.step(passed_s=ASK_AGAIN_S)
    assert books.books.held(books.now_s) == [] and room(books, "a") == 8 + QUANTUM + 1
    decoded(books, state, 8 + QUANTUM + 1)
    assert books.books.held(books.now_s) == ["a"]


def stuck() -> tuple[Books, list[RequestState]]:
    """Returns two requests that are both held: together they fill the server."""
    books = growing(2 * (8 + QUANTUM))
    states = [books.run("a"), books.run("b")]
    for state in states:
        decoded(books, state, 8 + QUANTUM)
        books.step("a", "b")
    assert books.books.held(books.now_s) == ["a", "b"]
    return books, states


def test_the_last_of_those_that_are_all_held_gives_its_room_up() -> None:
    books, (_, second) = stuck()
    books.now_s += PARK_S - 0.1
    assert books.books.held(books.now_s) == ["a", "b"]
    books.pool.in_flight = {"b"}
    books.now_s += 0.2
    assert books.books.held(books.now_s) == ["a", "b"], "a step of it still reads the arena"
    books.pool.in_flight = set()
    assert books.books.held(books.now_s) == ["a"], "vLLM must come to it to preempt it"
    assert books.pool.losing == ["b"] and books.parts.count("parked_residencies") == 1
    books.step(preempted=["b"])
    second.request.num_computed_tokens = 0
    for _ in range(3):
        books.books.held(books.now_s)
        books.step("a", passed_s=2 * ASK_AGAIN_S)
    assert books.books.held(books.now_s) == [] and room(books, "a") > 8 + QUANTUM
    assert not books.books.is_admitted(second, books.now_s)
    for _ in range(100):
        books.books.held(books.now_s)
        books.step("a", passed_s=1.0)
    assert not books.pool.failed, "it waits in the queue for as long as it takes"
    later = books.arrive("c")
    books.pool.running.remove("a")
    books.books.ended("a")
    for _ in range(3):
        books.step(passed_s=2 * ASK_AGAIN_S)
        assert not books.books.is_admitted(later, books.now_s) or books.books.has_room("b")
    assert books.books.is_admitted(second, books.now_s)
    assert room(books, "b") == 8 + QUANTUM + 1 + QUANTUM
    books.pool.running.add("b")
    books.keep(second, 8 + QUANTUM)


def test_no_request_is_parked_while_the_server_is_away() -> None:
    """It could give nothing to others; one that is held waits for the server, and not for ever."""
    books, _ = stuck()
    books.server.die(empty=False)
    for _ in range(int(TIMEOUT_S) - 1):
        assert books.books.held(books.now_s) == ["a", "b"]
        books.step(passed_s=1.0)
    assert not books.pool.losing and not books.pool.failed
    for _ in range(2):
        books.step(passed_s=1.0)
    assert "residency_timeout_s" in books.pool.failed["a"]


def test_after_a_restart_the_room_that_it_had_is_reserved_anew() -> None:
    books = growing()
    state = books.run()
    decoded(books, state, QUANTUM)
    books.step("a", passed_s=1.0)
    had = room(books, "a")
    assert had > 8 + QUANTUM
    books.server.die(empty=False)
    books.step("a")
    books.server.come_back()
    books.server.residencies.most_blocks = had
    for _ in range(2):
        books.step("a", passed_s=ASK_AGAIN_S)
    assert room(books, "a") == had and books.books.has_room("a")


def test_a_preempted_request_begins_again_once_all_its_blocks_have_room() -> None:
    books = growing(8 + QUANTUM)
    state = books.run()
    decoded(books, state, 8 + QUANTUM)
    books.step(preempted=["a"])
    state.request.num_computed_tokens = 0
    books.step(passed_s=2.0)
    assert not books.books.is_admitted(state, books.now_s) and not books.books.has_room("a")
    books.server.residencies.most_blocks = None
    for _ in range(2):
        books.step(passed_s=2.0)
    assert books.books.is_admitted(state, books.now_s) and books.books.has_room("a")


def test_what_the_server_can_never_hold_ends_with_an_error_once_it_is_needed() -> None:
    books = growing()
    state = books.run()
    books.refuse(Reason.RESIDENCY_TOO_LARGE)
    decoded(books, state, 8 + QUANTUM - 1)
    for _ in range(3):
        assert books.books.held(books.now_s) == []
        books.step("a", passed_s=1.0)
    assert not books.pool.failed, "the answer may end before"
    decoded(books, state, 8 + QUANTUM)
    for _ in range(3):
        books.books.held(books.now_s)
        books.step(passed_s=1.0)
    assert "told to refuse" in books.pool.failed["a"]


def test_a_lost_request_is_not_held() -> None:
    """vLLM preempts it when it comes to it."""
    books, _ = stuck()
    books.books._residents["a"].is_lost = True
    assert books.books.held(books.now_s) == ["b"]
    books.books.lost(["a"])
    assert books.books.held(books.now_s) == ["b"]


# ------------------------------------------------------------------ requests that begin as a whole


def whole(most_blocks: int | None = None) -> tuple[Books, RequestState]:
    """Returns a request that runs on the device as a whole."""
    books = growing(most_blocks)
    books.pool.whole = {"a"}
    return books, books.run()


def test_a_whole_request_needs_no_room_in_the_server() -> None:
    books, state = whole(0)
    for blocks in range(8, 12):
        decoded(books, state, blocks)
        for _ in range(int(TIMEOUT_S)):
            assert books.books.held(books.now_s) == []
            books.step("a", passed_s=1.0)
    assert not books.pool.failed and not books.books.kept_tokens("a")
    assert not books.books.is_freeing(books.now_s)
    books.pool.asked = Demand(0, 0, 1, None)
    books.books.make_room()
    assert books.pool.whole == {"a"}, "it can't leave a device that alone has it"


def test_a_whole_request_is_moved_when_the_pool_lacks_blocks_and_never_back() -> None:
    books, state = whole()
    books.keep(state, 5)
    books.books.make_room()
    assert books.pool.whole == {"a"} and not books.parts.count("moved_residencies")
    books.pool.asked = Demand(0, 0, 1, None)
    books.books.make_room()
    assert not books.pool.whole and books.parts.count("moved_residencies") == 1
    books.books.make_room()
    assert books.parts.count("moved_residencies") == 1
    books.server.die(empty=False)
    state.request.num_computed_tokens = 6 * TOKENS
    for _ in range(int(TIMEOUT_S) + 1):
        books.step("a", passed_s=1.0)
    assert "residency_timeout_s" in books.pool.failed["a"], "now it needs the server"


def test_a_whole_request_outlives_the_server() -> None:
    """A server that comes back empty costs it nothing: the device has all that was lost."""
    books, state = whole()
    books.keep(state, 3)
    books.server.die(empty=True)
    for blocks in range(4, 4 + 2 * int(TIMEOUT_S)):
        state.request.num_computed_tokens = blocks * TOKENS
        books.step("a", passed_s=1.0)
    books.pool.asked = Demand(0, 0, 1, None)
    books.books.make_room()
    assert books.pool.whole == {"a"} and not books.pool.failed
    books.server.come_back()
    for _ in range(6):
        step = books.step("a", passed_s=ASK_AGAIN_S)
        assert not step.lost
    assert not books.books.kept_tokens("a") and not books.pool.losing
    state.request.num_computed_tokens = 0
    books.keep(state, 5)
    books.books.make_room()
    assert not books.pool.whole


def test_a_hit_waits_for_pins_only_if_the_device_lacks_room() -> None:
    books = growing()
    books.pool.whole, books.pool.has_room = {"a"}, True
    state = books.arrive("a")
    for block in range(4):
        books.server.blocks[books.parts.space, 0, block_hash("a", block)] = {0: b"x"}
    assert books.books.is_admitted(state, books.now_s)
    assert books.books.keeps_hit(state.request, 4 * TOKENS, books.now_s)
    assert not books.server.count("extend_residency")
    books.pool.has_room = False
    assert books.books.keeps_hit(state.request, 4 * TOKENS, books.now_s) is None
    assert books.books.keeps_hit(state.request, 4 * TOKENS, books.now_s)
    assert books.books.kept_tokens("a") == 4 * TOKENS
    missing = books.books.keeps_hit(state.request, 6 * TOKENS, books.now_s)
    while missing is None:
        missing = books.books.keeps_hit(state.request, 6 * TOKENS, books.now_s)
    assert missing, "what the server did not pin is loaded"


# ------------------------------------------------------------------------------------- a new server


def test_who_has_bytes_to_pin_anew_waits_for_nobody() -> None:
    books = Books()
    books.keep(books.run("a"), 3)
    books.server.residencies.most = 1
    books.arrive("b")
    for _ in range(3):
        books.step("a", passed_s=TURN_S)
    books.server.die(empty=False)
    books.step("a")
    books.server.come_back()
    name = ("engine", books.books.residency_of("a"))
    books.step("a", passed_s=ASK_AGAIN_S)
    assert name in books.server.residencies.open


def test_what_was_asked_of_a_residency_that_was_given_up_means_nothing() -> None:
    books = Books()
    state = books.run()
    books.keep(state, 3)
    books.server.die(empty=True)
    books.step("a")
    books.server.come_back()
    books.server.hold = {"extend_residency"}
    for _ in range(2):
        books.step("a", passed_s=ASK_AGAIN_S)
    books.books.lost(["a"])
    books.server.hold = set()
    books.server.settle()
    assert books.step("a").lost == () and books.parts.count("lost_residencies") == 1


def test_blocks_that_the_server_does_not_take_end_the_request() -> None:
    books = Books()
    state = books.run()
    state.request.num_computed_tokens = 5 * TOKENS
    books.step("a")
    for _ in range(int(TIMEOUT_S) - 1):
        books.step("a", passed_s=1.0)
    assert not books.pool.failed
    books.step("a", passed_s=1.0)
    assert "residency_timeout_s" in books.pool.failed["a"]


def test_slow_steps_and_the_queue_do_not_count_and_new_blocks_begin_anew() -> None:
    books = Books()
    state = books.run()
    state.request.num_computed_tokens = 5 * TOKENS
    for _ in range(int(TIMEOUT_S) - 2):
        books.step("a", passed_s=60.0)
    assert not books.pool.failed, "a step counts for a second"
    books.step(preempted=["a"])
    for _ in range(100):
        books.step(passed_s=1.0)
    assert not books.pool.failed, "in the queue it waits for vLLM"
    assert books.books.is_admitted(state, books.now_s)
    books.pool.running.add("a")
    books.keep(state, 5)
    state.request.num_computed_tokens = 6 * TOKENS
    for _ in range(int(TIMEOUT_S) - 1):
        books.step("a", passed_s=1.0)
    assert not books.pool.failed


def test_preemptions_over_and_over_do_not_make_a_request_immortal() -> None:
    books = Books()
    state = books.run()
    for _ in range(12):
        state.request.num_computed_tokens = 5 * TOKENS
        for _ in range(3):
            books.step("a", passed_s=1.0)
        books.step(preempted=["a"], passed_s=1.0)
        state.request.num_computed_tokens = 0
        books.pool.running.add("a")
    assert books.pool.failed


def test_a_preempted_request_keeps_what_is_exact() -> None:
    books = Books()
    state = books.run()
    books.keep(state, 4)
    name = books.books.residency_of("a")
    books.step(preempted=["a"])
    assert books.books.residency_of("a") == name and books.books.kept_tokens("a") == 4 * TOKENS


def test_workers_hear_of_a_new_reservation_once_the_server_has_pinned_anew() -> None:
    books = Books()
    books.keep(books.run(), 3)
    old = books.books._residents["a"].pin
    name = ("engine", books.books.residency_of("a"))
    offsets = books.server.residencies.open[name].offsets
    books.server.die(empty=False)
    books.step("a")
    books.server.come_back()
    books.server.hold = {"extend_residency"}
    (row,) = books.step("a").rows
    # Its memory is that of the server before.
    books.server.residencies.open[name].offsets.update(offsets)
    (row,) = books.step("a").rows
    one = books.books._residents["a"]
    assert one.opened is not old and one.pin is old and row.pin is None
    books.server.hold = set()
    books.server.settle()
    (row,) = books.step("a").rows
    assert isinstance(row.pin, ResidencyOpened) and row.pin is one.opened


def test_a_loss_is_told_in_every_step_until_the_request_begins_anew() -> None:
    books = Books()
    state = books.run()
    books.keep(state, 3)
    books.server.die(empty=True)
    books.step("a")
    books.server.come_back()
    for _ in range(4):
        step = books.step("a")
    assert step.lost == ("a",) and not books.books.kept_tokens("a")
    assert not books.books.is_freeing(books.now_s)
    assert books.step("a").lost == ("a",)
    assert books.step(preempted=["a"]).lost == ()
    books.step()
    assert books.books.is_admitted(state, books.now_s)


def test_a_residency_that_the_server_has_closed_is_opened_again() -> None:
    books = Books()
    state = books.run()
    books.keep(state, 3)
    name = ("engine", books.books.residency_of("a"))
    offsets = books.server.residencies.open.pop(name).offsets
    state.request.num_computed_tokens = 4 * TOKENS
    state.store.stored_blocks[0] = 4
    books.books.names(state, 4)
    for _ in range(3):
        books.step("a", passed_s=ASK_AGAIN_S)
    assert name in books.server.residencies.open and offsets
    assert books.server.count("open_residency") == 2


def test_who_came_under_other_weights_gets_a_reservation_when_it_begins() -> None:
    books = Books()
    state = books.parts.state(request("a", LONG))
    assert not books.books.has_room("a")
    books.books.is_admitted(state, books.now_s)
    assert books.books.is_admitted(state, books.now_s) and books.books.has_room("a")


def test_rows_of_unknown_requests_say_what_was_given_back() -> None:
    books = Books()
    books.requests["b"] = request("b", LONG, computed=40)
    books.pool.freed["b"] = 3
    (row,) = books.step("b").rows
    assert row.may_outgrow and row.num_freed == 3 and not row.kept


def test_a_reset_makes_a_request_anew_of_which_more_is_stored_than_is_kept() -> None:
    books = Books()
    state = books.run()
    books.keep(state, 3)
    books.books.reset("a")
    assert not books.pool.losing and books.books.kept_tokens("a") == 3 * TOKENS
    books.books._residents["a"].state.store.stored_blocks[0] = 5
    books.books.reset("a")
    assert books.pool.losing == ["a"] and not books.books.kept_tokens("a")


def test_nobody_waits_for_blocks_while_a_lost_request_is_to_be_preempted() -> None:
    books = Books()
    books.run()
    books.books._residents["a"].storing[1] = 0
    assert books.books.is_freeing(books.now_s)
    books.pool.has_lost = True
    assert not books.books.is_freeing(books.now_s)


# ------------------------------------------------------------------- requests without shared names


class Adapters:
    """Stands for the engine's. `is_known`: whether there are keys for requests of an adapter."""

    def __init__(self) -> None:
        self.is_known = False

    def keys(self, one: Any) -> list[bytes]:
        return [b"keyed" + name[:27] for name in one.block_hashes] if self.is_known else []


def planner(books: Books) -> StorePlanner:
    parts = books.parts
    group = CacheGroup(0, GroupKind.FULL_ATTENTION, TOKENS)
    return StorePlanner(
        parts.session,
        parts.finder,
        (group,),
        1,
        parts.config,
        parts.stats,
        "p",
        exactness=parts.exactness,
        residencies=books.books,
    )


def stored_names(books: Books, state: RequestState, blocks: int) -> list[bytes]:
    """Computes so many blocks of a request; returns the names under which all of them are stored,
    and kept."""
    stores, names = planner(books), []
    request_id = state.request.request_id
    for block in range(blocks):
        state.request.num_computed_tokens = block * TOKENS
        due = stores.due({request_id: state}, {request_id: TOKENS}, (), {})
        for job in stores.plan(due, lambda _: (list(range(1, 20)),), {}, lambda: ())[0]:
            for run in job.runs:
                names += run.hashes
                for name in run.hashes:
                    books.server.blocks[books.parts.space, 0, name] = {0: b"x"}
            stores.reported(report((job.store_id, [BlockResult.STORED] * len(run.hashes))))
        books.step(request_id)
    state.request.num_computed_tokens = blocks * TOKENS
    for _ in range(2):
        books.step(request_id)
    assert books.books.kept_tokens(request_id) == blocks * TOKENS and not books.pool.failed
    return names


@pytest.mark.parametrize("why", ["adapter", "media"])
def test_a_request_that_may_not_be_shared_is_kept_under_names_of_its_own(why: str) -> None:
    seen: set[bytes] = set()
    for _ in range(2):
        books = Books(adapters=Adapters(), counts_media=why == "media")
        state = books.run()
        state.request.lora_request = object() if why == "adapter" else None
        state.request.mm_features = ["image"] if why == "media" else []
        names = stored_names(books, state, 6)
        assert len(set(names)) == 6 and not set(names) & set(state.request.block_hashes)
        assert not seen & set(names), "an engine finds what another has under its own names"
        seen |= set(names)


def test_names_that_become_shared_later_are_for_later_requests() -> None:
    """A request that began without keys goes on with names of its own: a hit needs all before."""
    adapters = Adapters()
    books = Books(adapters=adapters)
    first = books.run("a")
    first.request.lora_request = object()
    private = stored_names(books, first, 3)
    adapters.is_known = True
    keys = adapters.keys(first.request)
    assert not set(private) & set(keys) and not set(stored_names(books, first, 6)) & set(keys)
    second = books.run("b")
    second.request.lora_request = object()
    assert stored_names(books, second, 6) == adapters.keys(second.request)[:6]


def test_names_that_are_no_longer_shared_stay_where_they_were_given() -> None:
    adapters = Adapters()
    adapters.is_known = True
    books = Books(adapters=adapters)
    state = books.run()
    state.request.lora_request = object()
    shared = stored_names(books, state, 3)
    assert shared == adapters.keys(state.request)[:3]
    keys, adapters.is_known = adapters.keys(state.request), False
    assert not set(stored_names(books, state, 6)) & set(keys)


def test_a_preempted_request_without_shared_names_starts_over_under_other_names() -> None:
    """Nobody hits its blocks, so it computes anew what it had."""
    books = Books(adapters=Adapters())
    state = books.run()
    state.request.lora_request = object()
    before = stored_names(books, state, 4)
    books.step(preempted=["a"])
    books.pool.running.add("a")
    assert books.books.kept_tokens("a") == 0
    assert not set(stored_names(books, state, 4)) & set(before)


@pytest.mark.parametrize("length", [2, 7])
def test_an_answer_about_other_blocks_than_were_asked_for_keeps_none(length: int) -> None:
    """A block that counts as kept leaves the device."""
    books = Books()
    state = books.run()
    books.keep(state, 2)
    answer: Future[ResidentBlocks] = Future()
    places = np.arange(length, dtype=np.int64)
    answer.set_result(ResidentBlocks(places, places))
    books.parts.session.extend_residency = lambda *_: answer  # type: ignore[method-assign]
    state.request.num_computed_tokens = 5 * TOKENS
    books.books.names(state, 5)
    state.store.stored_blocks[0] = 5
    for _ in range(3):
        books.step("a")
    assert books.books.kept_tokens("a") == 2 * TOKENS


def test_what_is_not_kept_when_the_device_is_distrusted_is_nobody_elses() -> None:
    """Names that were given and not yet kept may stand for KV of other weights."""
    books = Books()
    state = books.run()
    books.keep(state, 3)
    given = list(books.books.names(state, 6))
    books.parts.exactness.distrust_all()
    books.books.distrust()
    names = books.books.names(state, 6)
    assert list(names[:3]) == given[:3] and not set(names[3:]) & set(given)
    assert state.store.stored_blocks[0] == 3 and not books.pool.losing
