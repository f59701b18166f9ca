"""Memory that the server's code allocates, for tests that bound it."""

import tracemalloc


def allocated_bytes() -> int:
    """Returns the bytes that the server's code has allocated since `tracemalloc.start`, and still
    holds. Leaves out what other threads of the process, such as those of pytest, allocate in other
    code."""
    server = tracemalloc.Filter(True, "*/hotkv_server/*")
    found = tracemalloc.take_snapshot().filter_traces([server])
    return sum(trace.size for trace in found.traces)
