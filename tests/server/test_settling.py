"""A stream that breaks while the server hangs in the middle of a load: the server keeps the
engine's memory until it closes it, or is dead."""

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockRun, GroupHashes, LinkState, LoadRun
from hotkv_client.testing import PagedEngine
from hotkv_proto.errors import SessionLostError
from tests.support.waiting import wait_for

NUM_BLOCKS = 64
LOOK_S = 0.5


def settling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hotkv-settle"]


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_a_load_of_a_broken_stream_stays_open_until_the_server_has_let_go(
    own_server: Server, engine: Callable[..., PagedEngine], end: signal.Signals
) -> None:
    one = engine(own_server.target, layers=4, num_blocks=2 * NUM_BLOCKS, reconnect_max_s=60.0)
    blocks = [os.urandom(32) for _ in range(NUM_BLOCKS)]
    at = np.arange(NUM_BLOCKS, dtype=np.int32)
    one.session.store("s", "s", [BlockRun(0, blocks, at)], 20).result(60)
    one.session.acquire("l", [GroupHashes(0, blocks)]).result(60)
    os.kill(own_server.pid, signal.SIGSTOP)
    future = one.session.load("l", "l", [LoadRun(0, at, at + NUM_BLOCKS)], 20)
    lookup = one.session.lookup([GroupHashes(0, blocks)])
    connection = one.session._connection
    assert connection is not None
    connection.channel.close()
    # What touches no memory fails at once; by then the load's fate has been decided too, if it did
    # not wait.
    assert isinstance(lookup.exception(60), SessionLostError)
    wait_for(lambda: one.session.state is LinkState.ABSENT)
    with pytest.raises(TimeoutError):
        future.exception(LOOK_S)
    assert len(settling()) == 1
    os.kill(own_server.pid, end)
    assert isinstance(future.exception(60), SessionLostError)
    # From here on the memory is the engine's alone.
    one.kv[:] = 77
    wait_for(lambda: not settling())
    began_s = time.monotonic()
    while time.monotonic() - began_s < LOOK_S:
        assert (one.kv == 77).all()
