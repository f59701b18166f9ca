"""The tier in Mooncake Store. Mooncake's native client runs in child processes.

The native client may crash, or hang if the store is down. In a child process hotkv can kill the
client, and a killed client can't touch slots of the arena. The tier's queue, threads and health
checks are those of all remote tiers (`tiers.remote`).
"""
