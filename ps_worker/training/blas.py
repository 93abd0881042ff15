"""How many threads BLAS takes for a product of matrices."""

from contextlib import AbstractContextManager

from threadpoolctl import threadpool_limits


def blas_threads(number: int) -> AbstractContextManager[object]:
    """Has BLAS multiply in so many threads, for the time of the block; in this whole process.

    By default it takes one for each core of the machine. They wait for each other without sleeping; where
    other processes have these cores, or a container may use few of them, that is most of what they do.
    """
    limits: AbstractContextManager[object] = threadpool_limits(limits=number, user_api="blas")
    return limits
