"""Communicators: when gradients leave a worker and when parameters arrive."""
