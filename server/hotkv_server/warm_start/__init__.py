"""A node lists its most useful blocks, so that another can fetch them."""
