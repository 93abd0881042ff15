"""The memory of a table: arenas that grow in place, the index from keys to rows, the layout of a row."""
