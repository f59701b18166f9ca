"""The connector's scheduler side: what runs in the process, and the thread, of vLLM's scheduler.

`side` holds the parts: `sharing` decides whether there is a cache, `admission` follows requests,
`hits` finds what the cache has for one, `stores` plans what to store of it, and `step_planner` puts
a step's work together. Nothing here touches the engine's memory. Nothing blocks after the start.
"""
