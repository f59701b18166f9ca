"""The daemon `hotkv-server`: owns the host memory with the cached blocks and their index, and
copies blocks between it and vLLM engines."""
