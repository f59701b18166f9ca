"""`engine_driver` with the commands of all drivers of one engine, and `pause`: the engine pauses,
and goes on."""

from typing import Any

import engine_driver
import feature_driver
import sparse_driver

__all__ = ["feature_driver", "sparse_driver"]


def pause(llm: Any) -> dict[str, Any]:
    core = llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort")
    core.resume_scheduler()
    return {}


engine_driver.OPERATIONS |= {"pause": pause}

if __name__ == "__main__":
    engine_driver.main()
