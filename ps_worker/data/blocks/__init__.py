"""Readers, their blocks of rows, and batches made of blocks."""
