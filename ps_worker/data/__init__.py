"""From click logs to batches."""
