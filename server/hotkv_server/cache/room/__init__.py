"""The slots of the arena, tenants' shares of it, eviction policies, and making room."""
