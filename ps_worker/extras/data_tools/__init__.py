"""`ps-data`: generates, converts, splits and profiles files."""
