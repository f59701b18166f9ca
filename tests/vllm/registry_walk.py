"""Prints as JSON what vLLM's model registry knows of each architecture whose code can be imported
here: the fields of its `_ModelInfo` by architecture.

A program of its own, as importing every model leaves much behind in a process. No model is built.
"""

import dataclasses
import json
import os
import sys
from typing import Any

from vllm.model_executor.models.registry import ModelRegistry, _ModelInfo


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    known: dict[type, dict[str, Any]] = {}
    found = {}
    for name, registered in ModelRegistry.models.items():
        try:
            model = registered.load_model_cls()
        except ImportError as error:
            # Packages that this environment leaves out, such as torchvision.
            print(f"{name}: {error}", file=sys.stderr)
            continue
        if model not in known:
            known[model] = dataclasses.asdict(_ModelInfo.from_model_cls(model))
        found[name] = known[model]
    answers.write(json.dumps(found))
    answers.close()


if __name__ == "__main__":
    main()
