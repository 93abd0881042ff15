"""Models that learn several labels of the same rows, such as clicks and conversions."""
