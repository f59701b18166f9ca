"""Trace spans (OpenTelemetry) of requests."""
