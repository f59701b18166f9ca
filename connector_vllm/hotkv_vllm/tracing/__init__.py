"""Makes trace spans of an engine's requests, if tracing is configured."""
