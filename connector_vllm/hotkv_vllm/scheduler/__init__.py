"""The connector's scheduler side. It runs in the process and thread of vLLM's scheduler.

Its modules:
- `side`: class `HotKVScheduler`, which creates the other parts and is called by vLLM's callbacks.
- `sharing`: decides whether the engine uses the shared cache.
- `admission`: follows each request from its arrival to its end.
- `hits`: finds the hit of a request.
- `stores`: plans the stores of a request.
- `step_planner`: assembles the message that each step carries to the workers.

This package never touches the engine's KV memory. After the engine's start its functions do not
block, except for the three calls that the docstring of `side` lists.
"""
