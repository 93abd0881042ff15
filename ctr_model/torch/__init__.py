"""Models in PyTorch: a module whose embeddings are rows of tables on servers.

    class Net(nn.Module):
        def __init__(self, schema: Schema, *, dim: int = 10) -> None:
            super().__init__()
            self.embedding = SlotEmbedding(dim=dim, init_range=0.01)
            width = schema.num_dense + len(schema.slots) * dim
            self.mlp = nn.Sequential(nn.Linear(width, 400), nn.ReLU(), nn.Linear(400, 1))

        def forward(self, batch: Batch) -> Tensor:
            return self.mlp(torch.cat([batch.dense, self.embedding(batch).flatten(1)], dim=1))

Needs the extra `torch`: pip install 'ctr-ps[torch]'.
"""

from ctr_ps.ctr_model import NEEDS_TORCH

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(f"{__name__} {NEEDS_TORCH}", name="torch") from error

from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.embedding import Front, SlotEmbedding
from ctr_ps.ctr_model.torch.model import TorchModel

__all__ = ["Batch", "Front", "SlotEmbedding", "TorchModel"]
