"""A training run of one worker, from the plan to the summary."""
