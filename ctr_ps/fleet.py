"""One script for servers and workers, as in PaddlePaddle's Fleet (docs/fleet.md)."""

from ctr_ps.ps_worker.fleet import *  # noqa: F403  the names are listed there
from ctr_ps.ps_worker.fleet import __all__ as __all__  # noqa: PLC0414  re-exported
