"""Records trace spans (OpenTelemetry) for an engine's requests, if tracing is configured."""
