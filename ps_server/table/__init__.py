"""Sharded tables of rows: index, slab, layout, initial values."""
