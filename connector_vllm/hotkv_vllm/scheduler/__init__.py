"""The connector's scheduler side. It runs in the process and thread of vLLM's scheduler.

`side` holds the parts: `sharing` decides whether there is a cache, `admission` follows requests,
`hits` finds the hit of a request, `stores` plans its stores, and `step_planner` assembles a step's
work. Nothing here touches the engine's memory. Nothing blocks after the start.
"""
