"""Static programs in the names of PaddlePaddle: `import ctr_ps.paddle as paddle` (docs/fleet.md).

Needs the extra `torch`: pip install 'ctr-ps[torch]'.
"""

from typing import Any

from ctr_ps.ps_worker.fleet.paddle import PADDLE


def __getattr__(name: str) -> Any:
    return getattr(PADDLE, name)
