"""Threads of PyTorch in a thread that trains or predicts."""

import torch


def use_one_thread() -> None:
    """Limits PyTorch to the calling thread: more threads would contend, and change sums."""
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
