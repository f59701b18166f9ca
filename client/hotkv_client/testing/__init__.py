"""For tests and benchmarks, here and elsewhere: an engine that speaks to a real server, and a
double of the server with faults."""

from hotkv_client.testing.fake import FakeServer
from hotkv_client.testing.fake_session import FakeSession
from hotkv_client.testing.paged import PagedEngine

__all__ = ["FakeServer", "FakeSession", "PagedEngine"]
