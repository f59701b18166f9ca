"""The connector's scheduler side: what runs in the process, and the thread, of vLLM's scheduler.

`side` takes the hooks, `hits` finds what the cache has for a request, `stores` plans what to store
of it. Nothing here touches the engine's memory, and nothing blocks after the start.
"""
