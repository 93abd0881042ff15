"""Training on a device: the rows of a pass go there with their optimizer state, train, and come back.

Its modules need PyTorch, and are imported by a job with `device.tables = "pass"` alone.
"""
