"""A training job of one worker, from its plan to its summary.

train_job     the whole, in order
start         the checkpoint to resume from or to start with
training      the passes, and what comes between two: shrink, validate, save
validation    evaluates on data.valid, tells all workers, finds the best and when to stop
checkpoints   what a checkpoint says of the run; BEST
summarizer    the final evaluation and the summary
"""
