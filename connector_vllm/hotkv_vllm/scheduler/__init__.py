"""The connector's scheduler side, in the process and thread of vLLM's scheduler. `side` is the
entry point.

It never touches the engine's KV memory. After the engine's start nothing blocks but the three
calls that `side` lists.
"""
