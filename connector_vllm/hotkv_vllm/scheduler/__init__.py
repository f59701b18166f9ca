"""The connector's scheduler side. It runs in the process and thread of vLLM's scheduler.

`side` holds the parts: `sharing` decides whether the engine uses the shared cache, `admission`
follows each request, `hits` finds the hit of a request, `stores` plans the stores of a request, and
`step_planner` assembles the message of a step. This package never touches the engine's KV memory.
After the engine's start its calls do not block, except for the waits that `side` lists.
"""
