"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE, and the order of test files.

`ci` repeats itself and is short, `thorough` explores, `hunt` explores too and doesn't shrink what
it finds.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}

settings.register_profile(
    "ci", max_examples=60, stateful_step_count=40, derandomize=True, **_COMMON
)
settings.register_profile("thorough", max_examples=400, stateful_step_count=80, **_COMMON)
settings.register_profile(
    "hunt", settings.get_profile("thorough"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Hundreds of servers are started; none should compile what the one before has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files that have slow tests before all others, so that no worker of `make test` is left
    alone with a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
