"""Names what a node uses most, so that another node can fetch it."""
