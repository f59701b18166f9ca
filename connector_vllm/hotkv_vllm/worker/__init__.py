"""The connector's worker side: what runs in the process of each rank, beside vLLM's model runner.

`side` takes the hooks, `layout` shows the engine's memory to the server, `session` registers it and
sends transfers, `rank_loads` and `rank_stores` follow these, `report` says what came of them, and
`device_order` orders transfers after the device's own work.
"""
