"""Scripts for working on hotkv; none of them is installed."""
