"""Events about blocks for routers and tools, over gRPC and ZMQ. The ZMQ publisher sends what
vLLM's does, and needs the extra `events`."""
