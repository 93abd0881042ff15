"""A training job of one worker, from its plan to its summary.

train_job     the whole, in order, with the final evaluation and the summary
training      goes through the passes, with what comes between two: shrink, validate, save
passes        the data from one barrier of all workers to the next, and its figures
validation    evaluates on data.valid, tells all workers, finds the best and when to stop
checkpoints   what the run resumes from or starts with, what a checkpoint says of it, BEST
"""
