"""Memory of a table: arenas that grow in place, rows and the hash index that finds them."""
