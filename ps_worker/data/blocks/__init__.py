"""Blocks of rows: what readers give, and how blocks become batches."""
