"""Rows of a table: their regions, and kernels that read, update, count and remove them."""
