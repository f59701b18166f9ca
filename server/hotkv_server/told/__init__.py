"""Reports a node's figures to operators: topics for `hotkv`, the status page, metrics, HTTP."""
