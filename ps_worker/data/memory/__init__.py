"""Rows in memory, and their shuffle over all workers."""
