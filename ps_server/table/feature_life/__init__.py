"""Feature life: admission of keys, expiry of rows at the end of a pass, eviction at a limit."""
