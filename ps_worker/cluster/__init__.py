"""The servers of a cluster as one store, and the way to reach them."""
