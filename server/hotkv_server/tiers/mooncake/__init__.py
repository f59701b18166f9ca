"""The tier in Mooncake Store, whose native client runs in child processes.

The client can crash, and it waits for stores that are away. A killed child can't touch slots.
Queue, threads and health are shared with the other remote tiers.
"""
