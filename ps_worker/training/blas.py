"""How many threads BLAS takes for a product of matrices."""

from contextlib import AbstractContextManager

from threadpoolctl import threadpool_limits


def one_blas_thread() -> AbstractContextManager[object]:
    """Has BLAS multiply in the thread that asks, for the time of the block; of this whole process.

    By default it takes as many threads as there are cores, which wait for each other without sleeping. Where
    other processes have these cores, that is most of what they do.
    """
    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
