"""A job: one TOML file that says what to train on what, and how (docs/job.md).

    [model] [data] [train] [valid] [optimizer] [life] [strategy] [device] [checkpoint] [run] [heter]
    [cluster]

Each key can be overridden by `--set section.key=value`. Every error begins with the file or the override
to change and names the key; for an unknown key also the nearest known one. Paths are relative to the working
directory.
"""

from ctr_ps.ps_worker.job.job import Job
from ctr_ps.ps_worker.job.reading import load_job, override_job

__all__ = ["Job", "load_job", "override_job"]
