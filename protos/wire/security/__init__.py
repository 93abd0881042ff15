"""Who a process is, and who may call it: accesses, tokens, certificates."""
