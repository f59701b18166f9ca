"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE.

`ci` repeats itself and is short, `thorough` explores, `hunt` explores too and doesn't shrink what it finds.
"""

import os

from hypothesis import HealthCheck, Phase, settings

_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

settings.register_profile("ci", max_examples=60, stateful_step_count=40, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=400, stateful_step_count=80, **_COMMON)
settings.register_profile("hunt", settings.get_profile("thorough"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
