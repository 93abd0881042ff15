"""Optimizers to test with."""

from ctr_ps.protos.spec import OptimizerSpec
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS

CUSTOM_PARAMS: dict[str, dict[str, float]] = {
    "sgd": {"learning_rate": 0.7},
    "adagrad": {"learning_rate": 0.3, "initial_accumulator": 0.25, "epsilon": 0.125},
    "adagrad_row": {"learning_rate": 0.3, "initial_g2sum": 0.5},
    "adam": {"learning_rate": 0.05, "beta1": 0.75, "beta2": 0.96875, "epsilon": 0.0625},
    "momentum": {"learning_rate": 0.7, "momentum": 0.75, "nesterov": 1.0},
    "adam_row": {"learning_rate": 0.05, "beta1": 0.75, "beta2": 0.96875, "epsilon": 0.0625},
    "ftrl": {"learning_rate": 0.25, "beta": 0.5, "l1": 0.125, "l2": 0.0625},
    "sum": {},
}
"""Every hyper-parameter away from its default, most of them exact in float32."""


def plain_optimizer(name: str, rate: float = 0.125) -> OptimizerSpec:
    return OptimizerSpec(name=name, params=dict.fromkeys(OPTIMIZERS[name].required, rate))
