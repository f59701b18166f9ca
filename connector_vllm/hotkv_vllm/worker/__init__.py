"""The connector's worker side, in the process of each rank.

- `side` (`HotKVWorker`) carries out vLLM's calls;
- `layout` exports the engine's KV memory;
- `rank_session` registers it with the server and sends transfers;
- `rank_loads` and `rank_stores` follow transfers until they end;
- `report` reports their ends to the scheduler side;
- `device_order` makes transfers wait for the device.
"""
