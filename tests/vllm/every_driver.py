"""`engine_driver` with the commands of all drivers of one engine, `pause`: the engine pauses, and
goes on, and `preempted`: how many requests were preempted."""

from typing import Any

import engine_driver
import feature_driver
import sparse_driver

__all__ = ["feature_driver", "sparse_driver"]


def pause(llm: Any) -> dict[str, Any]:
    core = llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort")
    core.resume_scheduler()
    # The core has lost its images; so must the front end, whose cache mirrors the core's.
    llm.llm_engine.reset_mm_cache()
    return {}


def preempted(llm: Any) -> dict[str, Any]:
    counted = [one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions"]
    return {"requests": sum(counted)}


engine_driver.OPERATIONS |= {"pause": pause, "preempted": preempted}

if __name__ == "__main__":
    engine_driver.main()
