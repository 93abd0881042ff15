"""The update log of a server: calls that change its state, on disk before they are answered."""
