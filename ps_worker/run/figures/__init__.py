"""Where figures of a run go: the folder of the run, and tables for people."""
