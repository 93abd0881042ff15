"""Models, one a file, each readable top to bottom."""
