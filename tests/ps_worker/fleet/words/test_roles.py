"""Role makers: from the environment, or from a script's own words."""

import pytest

from ctr_ps.protos.errors import RoleError
from ctr_ps.protos.role import ServerRole, WorkerRole
from ctr_ps.ps_worker.fleet.words.roles import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker

ENDPOINTS = ["ps-0:8500", "ps-1:8500"]
SERVER = {"current_id": 1, "role": Role.SERVER, "worker_num": 3, "server_endpoints": ENDPOINTS}


def test_environment_makes_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_ROLE", "TRAINER")
    monkeypatch.setenv("PADDLE_PSERVERS_IP_PORT_LIST", ",".join(ENDPOINTS))
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "3")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "2")

    role = PaddleCloudRoleMaker().role()

    assert role == WorkerRole(endpoints=tuple(ENDPOINTS), worker_index=2, num_workers=3)


def test_script_makes_the_role_of_a_server() -> None:
    role = UserDefinedRoleMaker(**SERVER).role()

    assert role == ServerRole(endpoints=tuple(ENDPOINTS), server_index=1, num_workers=3)


def test_script_makes_the_role_of_a_worker() -> None:
    role = UserDefinedRoleMaker(**SERVER | {"role": Role.WORKER, "current_id": 2}).role()

    assert role == WorkerRole(endpoints=tuple(ENDPOINTS), worker_index=2, num_workers=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"current_id": 2}, "current_id is 2, expected 0 to 1: the job has 2 servers"),
        ({"current_id": -1}, "current_id is -1"),
        ({"current_id": 3, "role": Role.WORKER}, "expected 0 to 2: the job has 3 workers"),
        ({"worker_num": 0}, "worker_num is 0, expected at least 1"),
        ({"server_endpoints": []}, "server_endpoints has no server"),
        ({"server_endpoints": ["ps-0"]}, "server_endpoints has 'ps-0', expected host:port"),
        ({"server_endpoints": ["a:1", "a:1"]}, "has a:1 more than once"),
        ({"is_collective": True}, "is_collective=True is not supported"),
    ],
)
def test_wrong_argument_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RoleError, match=message):
        UserDefinedRoleMaker(**SERVER | changes)


def test_collective_training_is_refused() -> None:
    with pytest.raises(RoleError, match="is_collective"):
        PaddleCloudRoleMaker(is_collective=True)


def test_endpoints_of_workers_say_how_many_there_are() -> None:
    settings = {"current_id": 1, "role": Role.WORKER, "server_endpoints": ["h:1"]}

    role = UserDefinedRoleMaker(worker_endpoints=["a:1", "b:2"], **settings).role()

    assert role.num_workers == 2
    with pytest.raises(RoleError, match="worker_num is 3, but there are 2 worker_endpoints"):
        UserDefinedRoleMaker(worker_num=3, worker_endpoints=["a:1", "b:2"], **settings)
    with pytest.raises(RoleError, match="worker_num is 0, expected at least 1"):
        UserDefinedRoleMaker(**settings)
