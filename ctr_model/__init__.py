"""Models of click-through rate: arrays in, arrays out."""

NEEDS_TORCH = "needs PyTorch, which is not installed: pip install 'ctr-ps[torch]'"
"""Message of features that need the extra, after their name."""

PROGRAM_FORMATS = (".onnx", ".pt2")
"""Suffixes of the files that ctr_model/torch/export.py writes."""
