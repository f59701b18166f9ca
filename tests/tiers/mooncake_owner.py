"""`python -m tests.tiers.mooncake_owner HOSTNAME BYTES` provides memory to a Mooncake Store
until the parent ends."""

import signal
import sys
import time
from typing import Any

from tests.support.waiting import end_with_the_parent

MASTER = "127.0.0.1:50051"
WAIT_S = 60.0


def set_up(hostname: str, owned_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    until_s = time.monotonic() + WAIT_S
    while True:
        store = MooncakeDistributedStore()
        if not store.setup(hostname, "P2PHANDSHAKE", owned_bytes, 16 << 20, "tcp", "", MASTER):
            return store
        assert time.monotonic() < until_s, "the master does not answer"
        time.sleep(0.1)


if __name__ == "__main__":
    end_with_the_parent()
    _store = set_up(sys.argv[1], int(sys.argv[2]))
    print("owns", flush=True)
    signal.pause()
