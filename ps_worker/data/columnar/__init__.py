"""Columnar formats: Parquet and ORC, and named columns in general."""
