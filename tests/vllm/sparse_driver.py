"""`engine_driver` with commands for sparse decode.

`sparse`: whether it is on, its layers, sequences that are tracked, requests that were preempted. `rewrite_always`: rows are rewritten also
where nothing is left out. `break_after` (calls): the selection raises from then on.
"""

from typing import Any

import engine_driver


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._sparse


def sparse(llm: Any) -> dict[str, Any]:
    worker = _worker()
    preempted = sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    if worker is None:
        return {"on": False, "preemptions": preempted}
    return {
        "on": True,
        "layers": [layer.index for layer in worker.layers.values()],
        "sequences": len(worker._sequences),
        "preemptions": preempted,
    }


def rewrite_always(_: Any) -> dict[str, Any]:
    _worker()._leaves_out = lambda row, blocks: True
    return {}


def break_after(_: Any, calls: int) -> dict[str, Any]:
    worker = _worker()
    original, left = worker._select, [calls]

    def select(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("injected")
        return original(*arguments)

    worker._select = select
    return {}


engine_driver.OPERATIONS |= {"sparse": sparse, "rewrite_always": rewrite_always, "break_after": break_after}

if __name__ == "__main__":
    engine_driver.main()
