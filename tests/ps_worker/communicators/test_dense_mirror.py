from ctr_ps.ps_worker.communicators.asynchronous import DenseMirror


def test_lent_parameters_stay_as_they_are_while_new_ones_are_published() -> None:
    mirror = DenseMirror(3)

    with mirror.lend() as before:
        for value in (1.0, 2.0, 3.0):
            number = mirror.spare()
            mirror.buffer(number)[:] = value
            mirror.publish(number)
        kept = before.tolist()
    with mirror.lend() as after:
        newest = after.tolist()

    assert kept == [0.0, 0.0, 0.0]
    assert newest == [3.0, 3.0, 3.0]


def test_buffers_are_reused_once_nobody_reads_them() -> None:
    mirror = DenseMirror(1)

    numbers = set()
    for _ in range(10):
        number = mirror.spare()
        numbers.add(number)
        mirror.publish(number)

    assert len(numbers) == 2
