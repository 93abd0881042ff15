"""What a training job on a cluster does not need; the rest of `ps_worker` imports none of it."""
