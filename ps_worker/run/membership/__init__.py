"""A worker's place in a job, and the lease that keeps it."""

from ctr_ps.ps_worker.run.membership.membership import Membership

__all__ = ["Membership"]
