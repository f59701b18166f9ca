"""The eviction policy. `bench/policies` has its rivals."""
