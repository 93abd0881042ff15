"""Training on a device: the rows of a pass go there with their optimizer state, train, and come back.

Its modules need PyTorch, and are imported by a job with `device.tables = "pass"` alone.
"""

from ctr_ps.ps_worker.run.plan import PassParts, PassTrainer


def new_pass_trainer(parts: PassParts) -> PassTrainer:
    """Returns the trainer of passes that `job.device` asks for; a `NewPassTrainer`."""
    from ctr_ps.ps_worker.extras.device_pass import pass_trainer  # late: it needs PyTorch

    return pass_trainer.PassTrainer(parts)
