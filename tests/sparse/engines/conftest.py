"""The fixtures of `tests.vllm`; without vLLM the folder has no tests."""

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.vllm.conftest import (
        _models_are_inspected_here,
        daemon,
        engine,
        engines,
        make,
        rig,
        server,
        shared_daemon,
        start,
        updated,
        warnings,
    )

    __all__ = [
        "_models_are_inspected_here",
        "daemon",
        "engine",
        "engines",
        "make",
        "rig",
        "server",
        "shared_daemon",
        "start",
        "updated",
        "warnings",
    ]
