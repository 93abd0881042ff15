"""A worker's place in a job, and the lease that keeps it."""

from ps_worker.run.membership.membership import Membership

__all__ = ["Membership"]
