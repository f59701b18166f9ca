"""The connector's worker side. It runs in the process of each rank, beside vLLM's model runner.

- `side` (class `HotKVWorker`) carries out vLLM's calls, with the help of the other modules;
- `layout` exports the engine's KV memory to the server;
- `session` registers this memory and sends transfers (loads and stores);
- `rank_loads` and `rank_stores` follow the transfers until they end;
- `report` reports the ends of transfers to the scheduler side;
- `device_order` makes transfers wait for the work that is already in the device's queue.
"""
