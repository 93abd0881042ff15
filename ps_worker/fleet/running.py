"""The one run of this process."""

from ps_worker.fleet.ending import watch
from ps_worker.fleet.fleet import Fleet

FLEET = Fleet(on_role=watch)
