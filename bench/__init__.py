"""Benchmarks. Each prints a table; with `--json` the last line is a JSON object."""
