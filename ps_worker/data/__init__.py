"""Datasets: click logs to batches."""
