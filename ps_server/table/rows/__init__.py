"""What is done with rows: read, update, count, remove."""
