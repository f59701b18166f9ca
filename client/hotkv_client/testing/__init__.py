"""Engines and test doubles for the tests and benchmarks of this and other packages.

`PagedEngine` is an engine that uses a real server. `FakeServer` and `FakeSession` replace a server
and its sessions without a process; tests make them fail on demand. `OddServer` is a gRPC server
that answers with arbitrary bytes.
"""

from hotkv_client.testing.fake import FakeServer, OddServer
from hotkv_client.testing.fake_session import FakeSession
from hotkv_client.testing.paged import PagedEngine

__all__ = ["FakeServer", "FakeSession", "OddServer", "PagedEngine"]
