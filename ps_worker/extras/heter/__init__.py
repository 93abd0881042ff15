"""Heterogeneous training: the dense part of a model in processes of its own, for several CPU trainers.

    CPU trainer     read, hash, pull, pool ~~activations~~.                .~~gradients~~> push those of rows
    heter trainer                                         '~> join, train -'-> push the dense gradient

Both are members of the job: CPU trainers are workers 0 to W - 1, heter trainers W to W + H - 1.
"""
