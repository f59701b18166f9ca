"""The connector's scheduler side, in the process and thread of vLLM's scheduler; `side` is its
entry. It never touches the engine's KV memory."""
