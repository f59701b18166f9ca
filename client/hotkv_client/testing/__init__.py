"""For tests and benchmarks, here and elsewhere: an engine that speaks to a real server, and a
double of the server with faults, and a server whose answers are any bytes."""

from hotkv_client.testing.fake import FakeServer, OddServer
from hotkv_client.testing.fake_session import FakeSession
from hotkv_client.testing.paged import PagedEngine

__all__ = ["FakeServer", "FakeSession", "OddServer", "PagedEngine"]
