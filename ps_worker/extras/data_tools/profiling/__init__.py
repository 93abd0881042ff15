"""Profiles of files: statistics of their columns in one pass, and a schema that follows from them."""
