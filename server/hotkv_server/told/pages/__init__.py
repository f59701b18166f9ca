"""Makes the answers of HTTP: probes, metrics, and the status page with its API."""
