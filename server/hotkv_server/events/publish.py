"""Opens the publisher of events, if the settings ask for it. Nothing of ZMQ is imported
otherwise."""

import importlib
import socket
from types import ModuleType
from typing import TYPE_CHECKING

from hotkv_proto.keys import KeySpace
from hotkv_server.settings import Settings
from hotkv_server.settings.outlets import EventSettings
from hotkv_server.startup import StartError

if TYPE_CHECKING:
    from hotkv_server.events.publisher import ZmqPublisher


def check_publisher(settings: Settings) -> None:
    """Raises StartError if events are wanted and can't be published."""
    if settings.events.endpoint:
        _zmq()


def _zmq() -> ModuleType:
    try:
        import hotkv_server.events.publisher  # noqa: F401 - needs more than zmq

        return importlib.import_module("zmq")
    except ImportError as missing:
        raise StartError(
            f"events.endpoint is set, but {missing.name} is not installed: pip install "
            "'hotkv[events]'"
        ) from missing


def make_publisher(settings: EventSettings) -> "ZmqPublisher | None":
    """The publisher of events; None if the settings name no endpoint. Raises StartError."""
    if not settings.endpoint:
        return None
    zmq = _zmq()
    from hotkv_server.events.publisher import ZmqPublisher

    host = socket.gethostname()

    def topic_of(number: int, key_space: KeySpace) -> str:
        return settings.topic.format(
            host=host, model=key_space.model, tenant=key_space.tenant, key_space=number
        )

    try:
        return ZmqPublisher(
            settings.endpoint,
            settings.replay_endpoint,
            topic_of,
            buffer_steps=settings.buffer_steps,
            buffer_bytes=settings.buffer_bytes,
            int_hashes=settings.int_hashes,
        )
    except zmq.ZMQError as error:
        raise StartError(
            f"events: {error}; is {settings.endpoint} or "
            f"{settings.replay_endpoint or '(no replay_endpoint)'} in use?"
        ) from error
