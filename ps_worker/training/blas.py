"""Number of BLAS threads of a matrix product."""

from contextlib import AbstractContextManager

from threadpoolctl import threadpool_limits


def blas_threads(number: int) -> AbstractContextManager[object]:
    """Limits BLAS to `number` threads in this process, within the block.

    By default it takes one per core. They wait for each other by spinning, which takes most of their time
    where other processes use these cores, or a container has few of them.
    """
    limits: AbstractContextManager[object] = threadpool_limits(limits=number, user_api="blas")
    return limits
