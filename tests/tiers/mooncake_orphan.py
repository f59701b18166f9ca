"""`python -m tests.tiers.mooncake_orphan` starts a Mooncake child, prints its process id, and
kills itself; the child must end too."""

import os
import signal
import time

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import MooncakeSettings
from hotkv_server.tiers.mooncake.tier import MooncakeClient
from tests.contracts.tier_contract import ARENA_BYTES
from tests.tiers.mooncake_owner import MASTER, WAIT_S

if __name__ == "__main__":
    fd = os.memfd_create("arena")
    os.ftruncate(fd, ARENA_BYTES)
    arena = Region(0, ARENA_BYTES, "arena")
    settings = MooncakeSettings(master=MASTER, local_hostname="127.0.0.1")
    client = MooncakeClient(settings, [(arena, fd)], time.monotonic() + WAIT_S)
    print(client._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
