"""The daemon `hotkv-server`. It owns the host memory with the cached blocks and the block index,
and copies blocks between host memory and vLLM engines."""
