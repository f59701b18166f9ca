"""The second of hotkv's two connectors (in the code: *doors*): hotkv as a tier below vLLM's own KV
offloading.

vLLM copies blocks between the device and its CPU memory, the *primary tier*, which is a file in
shared memory. hotkv-server maps that file and copies its rows to and from the arena. A *row* holds
one *chunk* (one or several consecutive blocks) of one KV cache group, with the shards of all ranks.
So this connector needs no CUDA in the server, no session per rank and no copy kernel of hotkv's.

A *promotion* is a load: a copy from the server into rows of the primary tier.

Read the modules in this order: `connector` (the class that users name), `scheduler` and `worker`
(its two sides), `tier` (the methods that vLLM calls for a tier), `requests` (how much a request may
promote), `transfers` (loads and stores in progress), `key_space`, `region`, `messages`.

docs/doors.md says when to use which connector.
"""
