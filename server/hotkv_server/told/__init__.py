"""A node's reports about itself: topics, status, metrics, HTTP."""
