"""The tier in Mooncake Store. Mooncake's native client runs in child processes.

The client may crash, or wait for a store that is away. In a child process it can be killed, after
which it can't touch slots of the arena. The code of queue, threads and health is shared with the
other remote tiers.
"""
