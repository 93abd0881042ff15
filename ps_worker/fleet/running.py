"""The one run of this process."""

from ctr_ps.ps_worker.fleet.ending import watch
from ctr_ps.ps_worker.fleet.fleet import Fleet

FLEET = Fleet(on_role=watch)
