"""Reports a node's figures to operators: by the command `hotkv`, the status page and metrics."""
