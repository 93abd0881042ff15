"""A job: one TOML file that says what to train on what, and how.

    [model] [data] [train] [optimizer] [strategy] [checkpoint] [cluster]

Each key can be overridden by `--set section.key=value`. An unknown key is an error that names the nearest
known one; a wrong value is an error that names file and key. Paths are relative to the working directory.
"""

from ps_worker.job.job import Job
from ps_worker.job.reading import load_job, override_job, stored_job

__all__ = ["Job", "load_job", "override_job", "stored_job"]
