"""Names the most useful blocks of a node, so that another node can fetch them."""
