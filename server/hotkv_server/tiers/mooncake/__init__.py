"""The tier in Mooncake Store, whose native client runs in child processes.

It can crash, and it waits for stores that are away; a child that is killed touches no slot any
more. Queue, threads and health are those of the tier in Valkey.
"""
