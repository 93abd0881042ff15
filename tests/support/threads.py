"""Threads that start together and must end."""

import threading
from collections.abc import Callable, Sequence

LIMIT_S = 20.0


def run_together(tasks: Sequence[Callable[[], None]]) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], None]) -> None:
        try:
            start.wait(LIMIT_S)
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
