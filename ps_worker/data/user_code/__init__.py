"""Data from user code: Python samples, data generators, pipe commands."""
