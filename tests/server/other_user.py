"""A client that runs as another user, for test_security: `python -m tests.server.other_user UID
GROUPS TARGET TENANT`.

The process starts as root, imports everything, switches to the user UID with these supplementary
groups, and opens a session. It prints a JSON object: the session's `state` and the reason; for an
open session also whether it could store a block and map the block table.
"""

import json
import os
import queue
import sys
from typing import Any

import grpc
import numpy as np

from hotkv_client import BlockRun, LinkState
from hotkv_client.admin import AdminClient
from hotkv_client.testing import PagedEngine
from hotkv_proto.errors import HotKVError

WAIT_S = 60.0


def main() -> None:
    uid, groups, target, tenant = sys.argv[1:]
    grpc.insecure_channel(
        target
    ).close()  # Loads modules whose folders the other user may not read.
    states: queue.Queue[tuple[LinkState, str]] = queue.Queue()
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setgid(int(uid))
    os.setuid(int(uid))
    engine = PagedEngine(
        target,
        tenant=tenant,
        engine_id="shared-name",
        on_state=lambda state, why: states.put((state, why)),
    )
    engine.session.start()
    state, why = states.get(timeout=WAIT_S)
    answer: dict[str, Any] = {"state": state.value, "why": why}
    if state is LinkState.CONNECTED:
        blocks = [os.urandom(32)]
        stored = engine.session.store(
            "s", "s", [BlockRun(0, blocks, np.zeros(1, np.int32))], WAIT_S
        ).result(WAIT_S)
        answer["results"] = stored.results[0].tolist()
        answer["is_mapped"] = engine.session.probe(0, blocks) is not None
    try:
        with AdminClient(target, 2.0) as admin:
            admin.info()
        answer["admin"] = "let in"
    except HotKVError as error:
        answer["admin"] = error.message
    print(json.dumps(answer), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
