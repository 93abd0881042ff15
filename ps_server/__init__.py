"""One server: owns shards of tables, applies gradients, knows nothing of models."""
