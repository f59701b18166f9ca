"""Each callback, with an exception in each function that it calls, once or always.

None may reach vLLM, answers must be right, nothing may be left. The callbacks are those of
vLLM's base class, so new ones are tested too.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from hotkv_vllm.callbacks import CALLBACKS, FALLBACKS
from hotkv_vllm.connector import HotKVConnector
from hotkv_vllm.identity import rekeying
from hotkv_vllm.metadata import HotKVMetadata
from hotkv_vllm.scheduler.find import hits
from hotkv_vllm.scheduler.store import stores_in_flight
from hotkv_vllm.worker import rank_loads
from tests.doubles.fake import FakeServer
from tests.vllm.faults import OWN, broken, called_by_callbacks
from tests.vllm.harness import Engine, prompt
from tests.vllm.oracle import check_nothing_left

OVERRIDDEN = [
    name
    for name, member in vars(HotKVConnector).items()
    if not name.startswith("_")
    and name != "has_connector_metadata"
    and any(hasattr(base, name) for base in (KVConnectorBase_V1, SupportsHMA))
]
AT_START = {
    "register_kv_caches",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "bind_kv_cache_manager",
}
OF_THE_CLASS = {"get_required_kvcache_layout", "supports_sleep_mode"}
AT_START |= OF_THE_CLASS
AT_SLEEP = {"unregister_kv_caches", "restore_kv_caches"}
AT_END = {"shutdown"}
OF_METRICS = {"build_kv_connector_stats", "build_prom_metrics"}
OF_COMPANIONS = {"has_pending_block_frees"} | {
    name
    for name, function in CALLBACKS.items()
    if not function.__module__.startswith("hotkv_vllm.")
}
FORWARDS = {
    "bind_connector_metadata": {
        *("super", "bind_connector_metadata", "isinstance", "HotKVMetadata", "loads"),
        "_before_forward",
    },
    "request_finished": {"request_finished_all_groups"},
    "requires_kv_delivery": {"config", "companion", "needs_delivery"},
    "take_events": {"_take_events", "_publishes_events"},
    "get_kv_connector_stats": {"_take_stats", "_stats", "data"},
}
"""They only call another callback, or return constants."""
DOES_NOTHING = {"wait_for_layer_load", "save_kv_layer"}
IN_STEPS = sorted(set(OWN) - AT_START - AT_SLEEP - AT_END - OF_METRICS - OF_COMPANIONS)
FIRST, SECOND, THIRD = prompt(1, 200), prompt(2, 400), prompt(3, 100)


def _code(name: str) -> Any:
    member = vars(HotKVConnector)[name]
    return (
        member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    ).__code__


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_each_callback_has_a_fallback(name: str) -> None:
    if name in FALLBACKS:
        assert len(FALLBACKS[name]) > 10
    else:
        assert name in DOES_NOTHING | FORWARDS.keys()
        called = set(_code(name).co_names)
        assert called == FORWARDS.get(name, set()), f"{name} uses {called}: it needs a fallback"


def test_each_fallback_is_that_of_a_callback() -> None:
    importlib.import_module("hotkv_vllm.offloading.connector")
    assert FALLBACKS.keys() == CALLBACKS.keys()


class Bench:
    """Functions raise only in `one`."""

    def __init__(self, make: Callable[..., Any], server: FakeServer) -> None:
        self.server = server
        self.make = make
        self.one, self.two = self.new(), make(blocks=64, flush_timeout_s=0.0)
        self.count = 0
        self.expected = {
            "a": self.two.generate("a", FIRST, 2)[0],
            "b": self.two.generate("b", SECOND, 2)[0],
            "c": self.two.generate("c", THIRD, 6)[0],
        }

    def new(self) -> Engine:
        made: Engine = self.make(
            blocks=22,
            flush_timeout_s=0.0,
            extra={
                "store_timeout_s": 0.01,
                "load_timeout_s": 60.0,
                # An idle engine steps no longer after a reset, even if a store's end is never
                # reported.
                "reset_timeout_s": 0.02,
            },
        )
        made.connector._publishes_events = True
        return made

    def renew(self) -> None:
        self.one.worker.shutdown()
        self.server.leases.clear()
        self.server.held.clear()
        self.one = self.new()

    def traffic(self) -> None:
        """Hits, misses, failed and hung loads, aborts, stores of reallocated blocks, a reset."""
        one, server, name = self.one, self.server, self.name
        server.blocks.clear()
        self.forget_local()
        # Stores end after the next requests have overwritten the blocks.
        server.hold, server.ack_cancels = {"store"}, True
        one.add(name("a"), FIRST, 2)
        one.run(300)
        one.add(name("b"), SECOND, 2)
        one.run(300)
        one.add(name("c"), THIRD, 6)
        one.steps(4)
        one.add(name("x"), SECOND, 3)
        one.run(300)
        server.resume()
        # A hit, a failed load, an aborted one, one that hangs until its blocks are quarantined.
        one.add(name("a2"), FIRST, 2)
        one.run(300)
        self.forget_local()
        one.add(name("a3"), FIRST, 2)
        one.run(300)
        for number in range(4, 7):
            self.forget_local()
            server.hold, server.fail_loads, server.ack_cancels = {"load"}, number == 4, False
            one.add(name(f"a{number}"), FIRST, 2)
            one.steps(3)
            if number > 4:
                one.abort(name(f"a{number}"))
            if number != 5:
                server.settle("load")
            one.steps(4)
            server.resume()
            one.run(300)
            server.fail_loads, server.ack_cancels = False, True
            # A step must return quarantined blocks to vLLM.
            one.generate(name(f"step{number}"), prompt(9, 10))
        one.connector.reset_cache()
        one.generate(name("last"), prompt(9, 10))

    def forget_local(self) -> None:
        """Does nothing if an exception left requests."""
        if not self.one.scheduler.requests:
            self.one.scheduler.reset_prefix_cache()

    def name(self, request: str) -> str:
        return f"{request}.{self.count}"

    def judge(self) -> None:
        for request in ("a", "b", "c", "a2", "a3", "a4"):
            got = self.one.outputs[self.name(request)]
            assert got == self.expected[request[0]], f"{request}: {got}"
        assert len(self.one.outputs[self.name("x")]) == 3

    def afterwards(self) -> None:
        one, two = self.one, self.two
        two.drop_local()
        for request, tokens, count in (("a", FIRST, 2), ("b", SECOND, 2), ("c", THIRD, 6)):
            assert two.generate(self.name(request), tokens, count)[0] == self.expected[request]
        for turn in range(3):
            one.drop_local()
            answer = one.generate(self.name(f"hit{turn}"), FIRST, 2)
            one.generate(self.name(f"end{turn}"), prompt(9, 10), 2)
            if answer == (self.expected["a"], 192):
                break
        assert answer == (self.expected["a"], 192), "it hits again"
        one.drop_local()
        check_nothing_left(one, may_count_errors=True)
        assert one.connector._scheduler.sharing.links.are_complete
        assert not self.server.leases and not self.server.held


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hits, "MISS_MEMORY_S", 0.0)
        patch.setattr(rank_loads, "CANCEL_GRACE_S", 0.0)
        patch.setattr(rekeying, "ASK_AGAIN_S", 0.0)
        patch.setattr(rekeying, "PATIENCE_S", 0.1)
        yield


@pytest.fixture(scope="module")
def bench(quick: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    server, folder, made = FakeServer(), tmp_path_factory.mktemp("callbacks") / "model", []
    with pytest.MonkeyPatch.context() as patch:

        def make(**settings: Any) -> Engine:
            made.append(Engine(server, folder, patch, **settings))
            return made[-1]

        yield Bench(make, server)
        for one in made:
            one.shutdown()


def functions_of(run: Callable[[], object]) -> dict[str, list[FunctionType]]:
    """A function of several callbacks stands under the first."""
    seen: set[FunctionType] = set()
    found = {}
    for callback, called in called_by_callbacks(run).items():
        found[callback] = sorted(called - seen, key=lambda one: one.__qualname__)
        seen |= called
    return found


@pytest.fixture(scope="module")
def calls(bench: Bench) -> dict[str, list[FunctionType]]:
    found = functions_of(bench.traffic)
    bench.judge()
    bench.afterwards()
    return found


def test_the_traffic_is_what_it_says(bench: Bench, calls: dict[str, list[FunctionType]]) -> None:
    assert not [
        callback for callback in IN_STEPS if not calls[callback] and callback not in ("_rows_of",)
    ]
    taken = {one.__qualname__ for called in calls.values() for one in called}
    assert taken >= {
        "RankStores._take_back",
        "RankLoads.give_up",
        "Quarantine.overdue",
        "HitFinder.load_failed",
        "CacheReset.begin",
    }
    counted = bench.one.counters
    assert all(
        counted.get(name)
        for name in ("loads", "failed_loads", "hung_loads", "flushes", "stored_blocks", "resets")
    ), counted
    assert not counted.get("callback_errors")


@pytest.mark.parametrize(
    ("only_once", "some"),
    [
        pytest.param(True, slice(0, None, 2), id="once"),
        pytest.param(True, slice(1, None, 2), id="once, the others", marks=pytest.mark.long),
        pytest.param(False, slice(None), id="always", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("callback", IN_STEPS)
def test_a_broken_callback_harms_no_request(
    bench: Bench, calls: dict[str, list[FunctionType]], callback: str, only_once: bool, some: slice
) -> None:
    """some: slice of the functions; everyday runs take every second."""
    num_strikes, functions = 0, calls[callback][some]
    for function in functions:
        bench.count += 1
        num_errors = bench.one.counters.get("callback_errors", 0)
        try:
            with broken(function, only_once=only_once) as fault:
                bench.traffic()
            num_strikes += fault.strikes
            if function.__qualname__ == "FakeSession.release":
                # A real server's leases would expire; the fake has no clock.
                bench.server.leases.clear()
            bench.judge()
            with (
                lost_reports_are_noticed()
                if function.__qualname__ == "StoresInFlight.account"
                else contextlib.nullcontext()
            ):
                bench.one.generate(bench.name("begin"), prompt(9, 10), 3)
            bench.afterwards()
            if function.__name__ == callback:
                assert bench.one.counters["callback_errors"] > num_errors
        except Exception as error:
            bench.renew()
            raise AssertionError(
                f"{callback}: {function.__qualname__} broken: {type(error).__name__}: {error}"
            ) from error
    assert num_strikes or not functions


def test_a_broken_step_is_not_skipped(bench: Bench) -> None:
    """The step before it was idle."""
    one = bench.new()
    one.worker._rests = True
    with broken(inspect.unwrap(HotKVConnector.handle_preemptions)):
        one.worker.handle_preemptions(HotKVMetadata())
    assert not one.worker._rests


def test_a_step_after_unknown_allocations_tells_the_workers(bench: Bench) -> None:
    """The connector does not know what vLLM allocated."""
    one = bench.new()
    one.generate("before", prompt(7, 10))
    num_before = len(one.metas)
    with broken(inspect.unwrap(HotKVConnector.update_state_after_alloc), only_once=True):
        one.generate("a", prompt(8, 100), 3)
    (lost,) = [at for at, meta in enumerate(one.metas) if meta.lost_track]
    assert lost == num_before
    one.shutdown()


@contextlib.contextmanager
def lost_reports_are_noticed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores_in_flight, "UNREPORTED_S", 0.0)
        yield


# ------------------------------------------------------------------------------ start, end, metrics


@pytest.mark.parametrize("callback", sorted(AT_START - OF_THE_CLASS))
def test_a_callback_that_breaks_at_the_start(bench: Bench, callback: str) -> None:
    functions = functions_of(bench.new)[callback]
    assert functions
    for function in functions:
        bench.count += 1
        name = f"{callback}: {function.__qualname__} broken"
        bench.server.blocks.clear()
        with broken(function) as fault:
            one = bench.new()
            assert fault.strikes, name
        try:
            for request in ("a", "a2"):
                assert one.generate(bench.name(request), FIRST, 2)[0] == bench.expected["a"]
                one.drop_local()
            bench.two.drop_local()
            assert bench.two.generate(bench.name("a"), FIRST, 2)[0] == bench.expected["a"]
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        finally:
            one.shutdown()


def test_broken_shutdown_closes_all_memory(bench: Bench) -> None:
    """Descriptors of the KV memory must be closed."""
    for function in functions_of(bench.new().shutdown)["shutdown"]:
        one = bench.new()
        memory = one.worker._worker.rank.memory
        with broken(function):
            one.shutdown()
        if "shutdown" not in function.__name__ and function.__qualname__ != "ExportedMemory.close":
            assert not memory.fds, function


def test_callbacks_of_the_class_break(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bench.one.vllm_config
    for name, *arguments in (
        ("get_required_kvcache_layout", config),
        ("build_kv_connector_stats", {"loads": 1}),
        ("build_prom_metrics", config, METRICS, [], {0: []}),
        ("supports_sleep_mode", None),
    ):
        with broken(inspect.unwrap(getattr(HotKVConnector, name))) as fault:
            answer = getattr(HotKVConnector, name)(*arguments)
        assert fault.strikes == 1
        if name == "build_prom_metrics":
            answer.observe({"loads": 1})
        elif name == "supports_sleep_mode":
            assert answer
        else:
            assert not answer or answer.is_empty()
    metrics = HotKVConnector.build_prom_metrics(config, METRICS, [], {})
    # An exception would end vLLM's output loop.
    metrics.observe({"loads": 1}, 7)
    # Even the replacement raises.
    monkeypatch.setattr("hotkv_vllm.connector.SilentPromMetrics", lambda *_: 1 // 0)
    with broken(inspect.unwrap(HotKVConnector.build_prom_metrics)):
        assert HotKVConnector.build_prom_metrics(config, METRICS, [], {0: []}) is None


METRICS = dict.fromkeys((Gauge, Counter, Histogram), lambda **_: None)
