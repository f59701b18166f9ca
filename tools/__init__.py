"""Scripts for developers of hotkv; they are not installed."""
