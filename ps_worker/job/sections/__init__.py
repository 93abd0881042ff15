"""The sections of a job, each checked by itself; docs/job.md has the meaning of all keys."""
