"""Measurements: each module prints one JSON line a case."""
