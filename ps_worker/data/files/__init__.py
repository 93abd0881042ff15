"""Files: names and patterns, content, splits, atomic writes."""
