"""Slots of the arena: the pool, the tenants' shares of it, eviction policies, and making room.
Pure: no clock, no I/O, no threads."""
