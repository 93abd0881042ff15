"""The sections of a job, each checked by itself."""
