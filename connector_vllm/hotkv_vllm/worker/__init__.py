"""The connector's worker side, in the process of each rank, beside vLLM's model runner.

- `side` (`HotKVWorker`) carries out vLLM's calls;
- `layout` exports the engine's KV memory to the server;
- `rank_session` registers this memory and sends transfers;
- `rank_loads` and `rank_stores` follow the transfers until they end;
- `report` reports their ends to the scheduler side;
- `device_order` makes transfers wait for work that is already in the device's queue.
"""
