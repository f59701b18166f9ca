"""The second door (of hotkv's two connectors): hotkv as a tier below vLLM's own KV offloading.

vLLM copies blocks between the device and its CPU tier, the *primary tier*: a file in shared memory.
hotkv-server maps that file and copies rows between it and the arena. A row holds one chunk of one
KV cache group, with the shards of all ranks. So this door needs no CUDA in the server, no session
per rank and no copy kernel of hotkv's.

To be read in this order: `connector` (the class that users name), `scheduler` and `worker` (its two
sides), `tier` (the calls of vLLM's tiering), `requests` (how much a request may promote),
`transfers` (loads and stores under way), `key_space`, `region`, `messages`.

docs/doors.md says when to use which door.
"""
