"""Formats that are columns: Parquet and ORC."""
