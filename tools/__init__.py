"""Scripts for work on hotkv; they are not installed."""
