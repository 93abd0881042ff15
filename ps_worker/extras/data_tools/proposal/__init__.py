"""A schema and a first job for files that nobody has prepared."""
