"""The second door: hotkv as a tier below vLLM's own KV offloading.

The primary tier is a file in shared memory. hotkv-server maps it and copies its rows to and from
the arena; a row holds one chunk of one group, with the shards of all ranks. So the server needs no
CUDA, the ranks need no sessions, and hotkv needs no copy kernel. A *promotion* is a load into rows.

`connector` is the class that users name, `scheduler` and `worker` are its sides, `tier` is what
vLLM calls as a tier. docs/doors.md says when to use which door.
"""
