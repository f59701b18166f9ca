"""The connector's worker side: what runs in the process of each rank, beside vLLM's model runner.

`side` takes the hooks, `layout` and `exported` show the engine's memory to the server, `loads` has
the rules of loads, and `device_order` orders transfers after the device's own work.
"""
