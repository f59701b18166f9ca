"""Defines hypothesis profiles, chosen by HYPOTHESIS_PROFILE, and the order of test files.

`daily` (`make test`) and the shorter `quick` (`make test-fast`) use the same examples each time,
`ci` (`make test-long`) about as many others, with more steps. `thorough` searches for new ones
each time; `hunt` too, without shrinking.
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
# Beyond the test's time limit, pytest would report a timeout instead of the failure.
engine.MAX_SHRINKING_SECONDS = 60
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "daily")
settings.load_profile(PROFILE)
if PROFILE == "ci":
    # hypothesis derives examples from this digest: `ci` must not repeat those of `daily`.
    core.function_digest = lambda test: function_digest(test) + PROFILE.encode()
if settings.default.derandomize:
    # hypothesis would also draw constants of loaded modules, so examples would depend on which
    # tests the worker ran before.
    providers._get_local_constants = providers.Constants

# Workers share the cores; more threads of torch wait for each other in busy loops (45 s instead
# of 2 s).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# vLLM reads these variables when it is imported.
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# A shell that starts pytest in the background ignores SIGINT; the programs under test would
# inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hundreds of servers start; later ones reuse the .pyc files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


LONGEST = (
    "sparse/engines/test_residency_pairs.py",
    "sparse/engines/test_residency_callbacks.py",
    "sparse/engines/test_cuda_residency.py",
    "sparse/engines/test_residency_auto.py",
    "offloading/test_engines.py",
    "sparse/engines/test_residency_faults.py",
    "pairs/test_nodes.py",
    "vllm/test_models.py",
    "robustness/test_flushes.py",
    "sparse/engines/test_sparse.py",
    "sparse/engines/test_residency.py",
    "pairs/test_pairs.py",
    "vllm/test_http.py",
    "vllm/test_end_to_end.py",
    "vllm/test_parallel.py",
)
"""Start first, in this order; then other files with slow tests."""


CHOSEN = "_hypothesis_internal_use_settings"
"""hypothesis' attribute with a test's settings."""


def _has_examples(item: pytest.Function) -> bool:
    own = item.cls if item.name == "runTest" else getattr(item, "obj", None)
    chosen = getattr(own, "settings" if item.name == "runTest" else CHOSEN, None)
    return getattr(chosen, "max_examples", 0) == settings.default.max_examples


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist exit without freeing all objects, which would take two seconds."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects campaign tests unless `-m` names them, marks tests with the profile's number of
    examples, and starts long files first, so that no worker is left alone with one. Without
    pytest-xdist the order stays: `tools/mutate.py` needs the quick files first."""
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
    """Freezes what collection imports: visiting vLLM's half a million objects takes each garbage
    collection half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Else frozen objects are not freed at exit, and nanobind reports leaks.
        atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
