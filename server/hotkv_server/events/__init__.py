"""Publishes events for routers over ZMQ, as vLLM's publisher does. Needs msgspec and pyzmq: the
extra `events`."""
