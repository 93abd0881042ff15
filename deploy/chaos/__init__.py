"""What `ps-launch --chaos` does to a run: its sentences, when each is due, and the report."""
