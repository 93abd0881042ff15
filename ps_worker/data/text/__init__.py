"""Text formats, one row a line."""
