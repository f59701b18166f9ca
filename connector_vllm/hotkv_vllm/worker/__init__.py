"""The connector's worker side. It runs in the process of each rank, beside vLLM's model runner.

`side` answers the hooks, `layout` exports the engine's memory to the server, `session` registers it
and sends transfers, `rank_loads` and `rank_stores` follow the transfers, `report` reports how they
ended, and `device_order` makes transfers wait for work that the device has queued before.
"""
