"""The parts of `bench.residency`: engines whose steps are timed and whose pool is watched, and the
cases that are measured with them."""
