"""Benchmarks, each run as `python -m bench.NAME`. Each prints a table; with `--json` the last line
is a JSON object."""
