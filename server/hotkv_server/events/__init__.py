"""Events as vLLM's own publisher sends them, over ZMQ, for routers. Needs msgspec and pyzmq: the
extra `events`."""
