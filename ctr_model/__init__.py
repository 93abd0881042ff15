"""Models of click-through rate: arrays in, arrays out."""

NEEDS_TORCH = "needs PyTorch, which is not installed: pip install 'ctr-ps[torch]'"
"""What is said, behind its name, of all that needs the extra and is used without it."""

PROGRAM_FORMATS = (".onnx", ".pt2")
"""How the files end that ctr_model/torch/export.py writes."""
