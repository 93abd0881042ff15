"""Published models as PyTorch modules, which jobs name like those in numpy; see docs/models.md.

Their options are JSON: numbers, texts, lists. Layers that several of them have are in `layers`. Batch norm of
a paper is left out, or LayerNorm in its place: servers store no statistics of batches.
"""
