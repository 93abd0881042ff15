"""How keys earn a row, and how rows go again."""
