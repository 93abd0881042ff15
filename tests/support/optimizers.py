"""Optimizers to test with."""

from protos.spec import OptimizerSpec
from ps_server.optimizers.registry import OPTIMIZERS


def plain_optimizer(name: str, rate: float = 0.125) -> OptimizerSpec:
    """Returns an optimizer with its defaults, and a rate if it has none."""
    return OptimizerSpec(name=name, params=dict.fromkeys(OPTIMIZERS[name].required, rate))
