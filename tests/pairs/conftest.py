"""Fixtures; without vLLM the folder has no tests."""

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.vllm.conftest import _models_are_inspected_here, engines, make, warnings

    __all__ = ["_models_are_inspected_here", "engines", "make", "warnings"]
