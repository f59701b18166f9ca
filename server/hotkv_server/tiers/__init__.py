"""Tiers below host memory: each moves bytes between slots of the arena and its store.

The book decides which block lies where (`tiers.book.lower`). The drive calls the tiers and reports
the results to the book.
"""
