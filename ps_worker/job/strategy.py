"""`[strategy]`: how workers keep together."""

from typing import Literal

from pydantic import Field

from ps_worker.job.sections import Section


class StrategySection(Section):
    """How workers keep together (docs/consistency.md).

    Attributes:
        mode: "sync": all workers step together; "async": each at its own pace.
        max_merge_var_num: Async: batches whose sparse gradients are averaged before they are sent.
        max_merge_dense_num: Async: the same for dense gradients.
        send_queue_size: Async: batches that may wait to be sent before training waits.
        max_delay_ms: Async: no gradient waits longer for others to be merged with.
    """

    mode: Literal["sync", "async"] = "async"
    max_merge_var_num: int = Field(1, ge=1)
    max_merge_dense_num: int = Field(4, ge=1)
    send_queue_size: int = Field(16, ge=1)
    max_delay_ms: float = Field(100.0, gt=0)
