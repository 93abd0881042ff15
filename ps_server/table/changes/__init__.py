"""Changes of a table: dirty rows and copy-on-write, subscribers, tombstones."""
