"""The daemon `hotkv-server`: owns host memory, the block index and the copies between them and
engines."""
