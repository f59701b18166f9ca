"""The second of hotkv's two connectors (in the code: *doors*): hotkv as a tier below vLLM's own KV
offloading.

vLLM copies blocks between the device and its CPU memory, the *primary tier*, which is a file in
shared memory. hotkv-server maps this file and copies its rows to and from the arena. A *row* holds
one *chunk* (one or several consecutive blocks that vLLM offloads as one unit) of one KV cache
group, with the parts of all ranks. So with this connector (`HotKVOffloadingConnector`) the server
needs no CUDA, the ranks need no sessions with the server, and hotkv needs no copy kernel of its
own.

A *promotion* is a load: a copy from the server into rows of the primary tier.

Read the modules in this order:
- `connector`: the class that users name;
- `scheduler` and `worker`: its two sides;
- `tier`: the methods that vLLM calls for a tier;
- `requests`: limits what a request may promote;
- `transfers`: executes loads and stores;
- `primary_rows`: keeps rows out of use that a hung server may still write;
- `awaited`: looks up chunks that another engine computes and for which a request waits;
- `key_space`: computes the key space of rows;
- `region`: finds the primary tier's file;
- `messages`: what the two sides send each other in each step.

docs/doors.md says when to use which connector.
"""
