"""Checkpoints of a run: when one is due, which stay, how a run resumes from one."""
