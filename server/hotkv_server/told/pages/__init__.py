"""The HTTP pages: probes, metrics, and the status page with its API."""
