"""Makes KV events (blocks became ready, blocks were removed) for routers, and sends them over gRPC
and over ZMQ. The ZMQ publisher sends the same messages as vLLM's, and needs msgspec and pyzmq: the
extra `events`."""
