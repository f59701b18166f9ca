import tracemalloc


def allocated_bytes() -> int:
    """Allocated by the server's code since `tracemalloc.start`, without what other code, such as
    pytest's threads, allocates."""
    server = tracemalloc.Filter(True, "*/hotkv_server/*")
    found = tracemalloc.take_snapshot().filter_traces([server])
    return sum(trace.size for trace in found.traces)
