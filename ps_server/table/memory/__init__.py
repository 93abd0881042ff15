"""Memory of a table: arenas that grow in place, the hash index from keys to rows, the layout of a row."""
