"""What HTTP serves: probes, metrics, and the status page with its API."""
