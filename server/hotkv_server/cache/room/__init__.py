"""The slots of the arena: the pool that allocates them, the tenants' shares of the arena, eviction
policies, and making room for new blocks. Pure: no clock, no I/O, no threads."""
