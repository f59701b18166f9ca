"""Lists the hashes of a node's most useful blocks, so that another node can fetch these blocks."""
