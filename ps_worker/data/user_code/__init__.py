"""Data by code of the user's own: samples, generators, commands."""
