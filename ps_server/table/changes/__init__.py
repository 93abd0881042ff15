"""Which rows changed, for whom, and what they were at the moment of a snapshot."""
