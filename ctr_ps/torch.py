"""PyTorch: modules as models of jobs, and tables for a loop of one's own (docs/torch.md).

| name | what for |
| --- | --- |
| `SlotEmbedding`, `Front`, `Batch`, `Task` | a module that a job trains: `model = "my_model.py:Net"` |
| `TorchModel` | such a module as the model of a Fleet script |
| `open_tables`, `Tables`, `Embedding`, `EmbeddingBag`, `PushOptimizer` | a loop of one's own |
| `swap_embeddings`, `restore_embeddings` | the same with a module that has embeddings of torch.nn |

Needs the extra `torch`: pip install 'ctr-ps[torch]'.
"""

from ctr_ps.ctr_model import torch as modules
from ctr_ps.ctr_model.models.model import Task
from ctr_ps.ctr_model.torch import *  # noqa: F403  the names are listed there
from ctr_ps.ps_worker import torch as loops
from ctr_ps.ps_worker.torch import *  # noqa: F403

__all__ = ["Task"]
__all__ += modules.__all__
__all__ += loops.__all__
