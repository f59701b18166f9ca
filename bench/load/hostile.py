"""Clients that mean no good, until they are killed: `python -m bench.load.hostile TARGET KIND`.

flood: calls without waiting for answers. garbage: bytes that are no messages, streams that say
nonsense. deaf: a session that asks for much and never reads. spin: no client at all, only a process
that keeps a processor busy: what the others are compared with.
"""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator

import grpc

from bench.load.traffic import universe
from hotkv_client import GroupHashes
from hotkv_client.testing import PagedEngine
from hotkv_proto.errors import HotKVError

CONNECT = "/hotkv.v1.SessionService/Connect"
LOOKUP = "/hotkv.v1.CacheService/Lookup"


def _as_is(message: bytes) -> bytes:
    return message


def flood(target: str) -> None:
    """Lookups and stores of as many blocks as fit, never waiting."""
    engine = PagedEngine(target, model="hostile", engine_id=f"hostile-{os.getpid()}").connect(60.0)
    hashes = universe()
    while True:
        try:
            engine.session.lookup([GroupHashes(0, hashes)])
            engine.session.acquire(os.urandom(8).hex(), [GroupHashes(0, hashes)])
        except HotKVError:
            time.sleep(0.001)
        if not engine.session.connected:
            engine.session.wait_connected(1.0)


def garbage(target: str) -> None:
    """Random bytes to a unary method and to the session's stream."""
    with grpc.insecure_channel(target) as channel:
        unary = channel.unary_unary(LOOKUP, request_serializer=_as_is, response_deserializer=_as_is)
        stream = channel.stream_stream(
            CONNECT, request_serializer=_as_is, response_deserializer=_as_is
        )
        while True:
            with contextlib.suppress(grpc.RpcError):
                unary(os.urandom(2000), timeout=1)
            with contextlib.suppress(grpc.RpcError):
                list(stream(iter([os.urandom(500)] * 5), timeout=1))


def deaf(target: str) -> None:
    """Sends lookups for ever and reads no answer."""
    from hotkv_client import channels
    from hotkv_client.wire import requests as _wire

    engine = PagedEngine(target, model="hostile", engine_id=f"hostile-{os.getpid()}")
    hashes = universe()

    def requests() -> Iterator[_wire.Request]:
        yield _wire.open_session(engine.session.config)
        for number in itertools.count(1):
            request = _wire.lookup([GroupHashes(0, hashes)], 32)
            request.request_id = number
            yield request

    while True:
        with grpc.insecure_channel(target, channels.OPTIONS) as channel:
            call = _wire.connect(_wire.Stub(channel), requests())
            while call.is_active():
                time.sleep(0.1)


def spin(target: str) -> None:
    """Keeps one processor busy."""
    while True:
        sum(range(100_000))


KINDS: dict[str, Callable[[str], None]] = {
    "flood": flood,
    "garbage": garbage,
    "deaf": deaf,
    "spin": spin,
}


if __name__ == "__main__":
    KINDS[sys.argv[2]](sys.argv[1])
