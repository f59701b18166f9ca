"""Defines hypothesis profiles, chosen by HYPOTHESIS_PROFILE, and the order of test files.

`daily` is short and uses the same examples each time (`make test`). `quick` is shorter (`make
test-fast`). `ci` uses about as many other examples, with more steps (`make test-long`). `thorough`
searches for new examples each time, and `hunt` does so without shrinking failures.
"""

import asyncio
import atexit
import gc
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, core, settings
from hypothesis.internal.conjecture import engine, providers
from hypothesis.internal.reflection import function_digest

TESTS = Path(__file__).parent
_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}

settings.register_profile(
    "ci", max_examples=16, stateful_step_count=40, derandomize=True, **_COMMON
)
settings.register_profile(
    "daily", settings.get_profile("ci"), max_examples=15, stateful_step_count=30
)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=8)
settings.register_profile("thorough", max_examples=400, stateful_step_count=80, **_COMMON)
settings.register_profile(
    "hunt", settings.get_profile("thorough"), phases=[Phase.explicit, Phase.generate]
)
# hypothesis shrinks a failing example for at most 60 s. Beyond the test's time limit, pytest would
# report a timeout instead of the failure.
engine.MAX_SHRINKING_SECONDS = 60
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "daily")
settings.load_profile(PROFILE)
if PROFILE == "ci":
    # hypothesis derives a test's examples from this digest. If the digest did not change with the
    # profile, most examples of `ci` would be the same as those of `daily`.
    core.function_digest = lambda test: function_digest(test) + PROFILE.encode()
if settings.default.derandomize:
    # By default hypothesis also draws constants that it finds in loaded modules. Then a test's
    # examples would depend on which tests the same worker ran before.
    providers._get_local_constants = providers.Constants

# pytest's workers share the cores. With more than one thread per worker, torch's threads wait for
# each other in busy loops: a test of 2 s took 45 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# vLLM reads these variables when it is imported.
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# If a shell started pytest in the background, SIGINT is ignored. The programs under test would
# inherit this and not end by SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests start hundreds of servers. Python must write .pyc files, so that
# later servers reuse them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


LONGEST = (
    "pairs/test_residency.py",
    "vllm/test_residency_callbacks.py",
    "vllm/test_cuda_residency.py",
    "vllm/test_residency_auto.py",
    "offloading/test_engines.py",
    "vllm/test_residency_faults.py",
    "pairs/test_nodes.py",
    "vllm/test_models.py",
    "robustness/test_flushes.py",
    "vllm/test_sparse.py",
    "vllm/test_residency.py",
    "pairs/test_pairs.py",
    "vllm/test_http.py",
    "vllm/test_end_to_end.py",
    "vllm/test_parallel.py",
)
"""The files that take longest, in the order in which they start. Other files with slow tests start
after them.
"""


CHOSEN = "_hypothesis_internal_use_settings"
"""The attribute in which hypothesis keeps the settings of a test."""


def _has_examples(item: pytest.Function) -> bool:
    """Returns True if the test uses hypothesis with the profile's number of examples."""
    own = item.cls if item.name == "runTest" else getattr(item, "obj", None)
    chosen = getattr(own, "settings" if item.name == "runTest" else CHOSEN, None)
    return getattr(chosen, "max_examples", 0) == settings.default.max_examples


def pytest_configure(config: pytest.Config) -> None:
    """Makes a worker of pytest-xdist exit without freeing all objects, which would take two
    seconds. Other processes that run pytest, also those that a test starts, exit normally with
    their status."""
    if hasattr(config, "workerinput"):
        # Registered first, so it runs as the last exit function.
        atexit.register(os._exit, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects campaign tests unless `-m` names them. Marks tests that use the profile's number of
    examples. Sorts the longest files first, then files with slow tests, so that no worker of `make
    test` is left alone with a long file at the end. Without pytest-xdist the order is unchanged,
    because `tools/mutate.py` needs the quick files to fail first."""
    if "campaign" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("campaign")]
        items[:] = [item for item in items if not item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if isinstance(item, pytest.Function) and _has_examples(item):
            item.add_marker("examples")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    last = len(LONGEST)
    items.sort(key=lambda item: ranks.get(item.path, last + (item.path not in slow)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freezes the objects that collection imports, so that garbage collections skip them. vLLM
    alone creates half a million objects, and visiting them takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Without this, Python would not free the frozen objects when it ends, and nanobind
        # would report them as leaks.
        atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
