"""Benchmarks: `python -m bench.NAME` prints a table; with `--json` the last line is a JSON
object."""
