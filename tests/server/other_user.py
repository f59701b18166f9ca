"""A client that runs as another user: `python -m tests.server.other_user UID GROUPS TARGET
TENANT`. It starts as root, becomes UID with these groups, opens a session, and prints JSON:
`state` and reason; if open, whether it could store a block and map the block table."""

import json
import os
import queue
import sys
from typing import Any

import grpc
import numpy as np

from hotkv_client import BlockRun, LinkState
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
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
