"""Embedding tables for a user's own training loop, in process or on the servers of a cluster.

    with open_tables(mode="sync") as tables:
        model = Net()                          # has EmbeddingBag(16, table="items") among its layers
        tables.attach(model)
        rows = PushOptimizer(tables)           # of the embeddings
        dense = torch.optim.Adam(model.parameters())
        for items, offsets, labels in loader:
            loss = criterion(model(items, offsets), labels)
            dense.zero_grad(), rows.zero_grad()
            loss.backward()
            dense.step(), rows.step()

    keys --unique--> pull --> rows, a leaf of the graph --> F.embedding_bag --> loss
                                |  backward
                                v
                 PendingGradients, added by key --> PushOptimizer.step --> push

Needs the extra `torch`: pip install 'ctr-ps[torch]'.
"""

import ctr_ps.ctr_model.torch  # noqa: F401  first: without PyTorch its error names the extra
from ctr_ps.ps_worker.torch.connection import open_tables
from ctr_ps.ps_worker.torch.embedding import Embedding, EmbeddingBag
from ctr_ps.ps_worker.torch.optimizer import PushOptimizer
from ctr_ps.ps_worker.torch.swap import restore_embeddings, swap_embeddings
from ctr_ps.ps_worker.torch.tables import Tables

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "PushOptimizer",
    "Tables",
    "open_tables",
    "restore_embeddings",
    "swap_embeddings",
]
