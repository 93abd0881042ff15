"""`ps-data`: makes, converts, splits and describes files."""
