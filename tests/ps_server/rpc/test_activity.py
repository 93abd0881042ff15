"""Signs of life."""

from ctr_ps.ps_server.rpc.activity import Activity


def test_idle_time_counts_from_the_start_and_from_the_last_answer():
    now = [100.0]
    activity = Activity(lambda: now[0])

    now[0] = 107.0
    assert activity.idle_s == 7.0

    activity.begin()
    activity.end()
    now[0] = 109.0
    assert activity.idle_s == 2.0


def test_call_in_flight_is_a_sign_of_life():
    now = [100.0]
    activity = Activity(lambda: now[0])
    activity.begin()
    activity.begin()

    activity.end()
    now[0] = 10_000.0

    assert activity.idle_s == 0.0
