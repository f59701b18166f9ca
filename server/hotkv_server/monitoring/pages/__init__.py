"""Answers to HTTP requests: probes, metrics, and the status page with its API."""
