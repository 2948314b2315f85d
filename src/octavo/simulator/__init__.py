"""The scheduler and the cache that serve, on a virtual clock: what a service will do before there is one."""
