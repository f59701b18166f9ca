"""Engines and test doubles for tests and benchmarks.

`PagedEngine` is an engine for a real server. `FakeServer` and `FakeSession` replace a server and
its sessions without a process, and fail on demand. `OddServer` is a gRPC server that answers
with any bytes.
"""

from hotkv_client.testing.fake import FakeServer, OddServer
from hotkv_client.testing.fake_session import FakeSession
from hotkv_client.testing.paged import PagedEngine

__all__ = ["FakeServer", "FakeSession", "OddServer", "PagedEngine"]
