"""The role from the environment."""

import re

import pytest

from ctr_ps.protos.errors import RoleError
from ctr_ps.protos.role import HeterRole, Members, ServerRole, WorkerRole, role_from_environment

SERVERS = "10.0.0.1:7164,ps-1.ps:7164,[fd00::3]:7000"
SERVER = {
    "TRAINING_ROLE": "PSERVER",
    "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS,
    "PADDLE_TRAINERS_NUM": "2",
    "POD_IP": "ps-1.ps",
    "PADDLE_PORT": "7164",
}
WORKER = {
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS,
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "1",
}
HETER_LIST = "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"
HETER = {
    "TRAINING_ROLE": "HETER_TRAINER",
    "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS,
    "PADDLE_TRAINERS_NUM": "2",
    HETER_LIST: "h-0:9000,h-1:9000",
    "STAGE_ID": "2",
    "STAGE_NUM": "2",
    "POD_IP": "h-1",
    "PADDLE_PORT": "9000",
}
HETER_ON_GPU = HETER | {"HETER_DEVICE_TYPE": "gpu"}


def test_empty_environment_has_no_role():
    assert role_from_environment({}) is None


def test_pod_ip_alone_is_no_role():
    """Kubernetes manifests set it for reasons of their own."""
    assert role_from_environment({"POD_IP": "10.0.0.1"}) is None


def test_server_finds_itself_in_the_list():
    role = role_from_environment(SERVER)

    assert role == ServerRole(
        endpoints=("10.0.0.1:7164", "ps-1.ps:7164", "[fd00::3]:7000"), server_index=1, num_workers=2
    )
    assert (role.num_servers, role.endpoint, role.port) == (3, "ps-1.ps:7164", 7164)


def test_worker_has_its_index():
    role = role_from_environment(WORKER)

    assert role == WorkerRole(
        endpoints=("10.0.0.1:7164", "ps-1.ps:7164", "[fd00::3]:7000"), worker_index=1, num_workers=2
    )


@pytest.mark.parametrize("name", ["pserver", "PServer", " PSERVER "])
def test_role_ignores_case_and_blanks(name):
    assert isinstance(role_from_environment(SERVER | {"TRAINING_ROLE": name}), ServerRole)


@pytest.mark.parametrize("host", ["fd00::3", "[fd00::3]"])
def test_ipv6_server_may_name_itself_with_or_without_brackets(host):
    role = role_from_environment(SERVER | {"POD_IP": host, "PADDLE_PORT": "7000"})

    assert isinstance(role, ServerRole)
    assert role.server_index == 2


def test_blanks_around_endpoints_do_not_count():
    role = role_from_environment(WORKER | {"PADDLE_PSERVERS_IP_PORT_LIST": "a:1, b:2"})

    assert role is not None
    assert role.endpoints == ("a:1", "b:2")


@pytest.mark.parametrize("name", [name for name in SERVER if name != "TRAINING_ROLE"])
@pytest.mark.parametrize("value", [None, "", "  "], ids=["absent", "empty", "blank"])
def test_server_lacks_a_variable(name, value):
    environ = {key: text for key, text in SERVER.items() if key != name}

    with pytest.raises(RoleError, match=f"{name} is .*: set {name} to "):
        role_from_environment(environ if value is None else environ | {name: value})


@pytest.mark.parametrize("name", [name for name in WORKER if name != "TRAINING_ROLE"])
def test_worker_lacks_a_variable(name):
    with pytest.raises(RoleError, match=f"{name} is not set, but TRAINING_ROLE is 'TRAINER'"):
        role_from_environment({key: text for key, text in WORKER.items() if key != name})


def test_a_job_may_have_places_for_more_workers_than_it_starts_with():
    range_of = {"PADDLE_TRAINERS_NUM": "2:4"}

    server = role_from_environment(SERVER | range_of)
    worker = role_from_environment(WORKER | range_of | {"PADDLE_TRAINER_ID": "3"})

    assert server.members == worker.members == Members(4, num_at_start=2)
    assert worker.worker_index == 3
    assert [*worker.members.optional] == [2, 3]
    assert worker.members.terms["PADDLE_TRAINERS_NUM"] == "2:4"
    assert str(worker.members) == "2 to 4 workers"
    assert not Members(4).is_elastic
    assert not Members(4).optional


def test_variables_without_a_role_are_refused():
    with pytest.raises(
        RoleError, match="PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ID set without TRAINING"
    ):
        role_from_environment({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2"})


@pytest.mark.parametrize(
    ("role", "name", "value", "expected"),
    [
        (WORKER, "TRAINING_ROLE", "WORKER", ", expected PSERVER, TRAINER or HETER_TRAINER"),
        (WORKER, "TRAINING_ROLE", "", ", expected PSERVER, TRAINER or HETER_TRAINER"),
        (WORKER, "PADDLE_TRAINERS_NUM", "0", ", expected an integer of at least 1"),
        (WORKER, "PADDLE_TRAINERS_NUM", "two", ""),
        (WORKER, "PADDLE_TRAINERS_NUM", "3:2", ", expected a number of workers, or as 2:4 that at"),
        (SERVER, "PADDLE_TRAINERS_NUM", "0:2", ", expected a number of workers, or as 2:4 that at"),
        (WORKER | {HETER_LIST: "h-0:9000"}, "PADDLE_TRAINERS_NUM", "2:4", ", expected a number"),
        (WORKER, "PADDLE_TRAINERS_NUM", "٢", ""),
        (WORKER, "PADDLE_TRAINER_ID", "2", ", expected an integer, 0 to 1"),
        (WORKER, "PADDLE_TRAINER_ID", "-1", ""),
        (SERVER, "PADDLE_PORT", "70000", ", expected an integer, 1 to 65535"),
        (HETER, "STAGE_ID", "3", ", expected 2: stage 1 is"),
        (HETER, "STAGE_NUM", "3", ", expected CPU trainers and at most"),
        (HETER, HETER_LIST, "h-0:1;h-1:9000", ", expected CPU trainers and at most"),
        (HETER, "HETER_DEVICE_TYPE", "xpu", ", expected cpu or gpu"),
        (HETER_ON_GPU, "FLAGS_selected_gpus", "a", ", expected the number of a GPU"),
    ],
)
def test_value_that_cannot_be_is_named(role, name, value, expected):
    with pytest.raises(RoleError, match=re.escape(f"{name} is {value!r}{expected}")):
        role_from_environment(role | {name: value})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (SERVER | {"PADDLE_PORT": "7165"}, "'ps-1.ps:7165', which is not in PADDLE_PSERVERS_IP"),
        (SERVER | {"PADDLE_PORT": "7165"}, "or give --spare if it is to be added, or was added"),
        (SERVER | {"POD_IP": "10.0.0.9"}, "'10.0.0.9:7164', which is not in"),
        (HETER | {"POD_IP": "h-2"}, f"is 'h-2:9000', which is not in {HETER_LIST}"),
        (HETER | {HETER_LIST: ""}, f"none of {HETER_LIST}, PADDLE_HETER_TRAINER"),
        (HETER | {"PADDLE_TRAINERS_NUM": "1"}, "2 heter trainers, but the job has only 1 worker"),
    ],
)
def test_process_that_is_not_in_its_list_or_has_no_work_is_named(environ, message):
    with pytest.raises(RoleError, match=re.escape(message)):
        role_from_environment(environ)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("host", "host:", ":7164", "host:0", "host:65536", "host:x", "fd00::3:7", "[]:1", ""),
        *("a b:1", "ps-{0}:1", "ps-{02}:1", "ps-{}:1", "ps-{x}:1", "ps-{2}-{2}:1", "ps-{2:1"),
        "ps-{99999}:1",
    ],
)
def test_malformed_endpoint_is_named(endpoint):
    environ = WORKER | {"PADDLE_PSERVERS_IP_PORT_LIST": f"ok:1,{endpoint}"}

    with pytest.raises(RoleError, match=re.escape(f"has {endpoint!r}, expected host:port")):
        role_from_environment(environ)


def test_number_in_braces_stands_for_that_many_hosts():
    """A manifest of Kubernetes has the number of servers, and no list of their names."""
    environ = WORKER | {"PADDLE_PSERVERS_IP_PORT_LIST": "ps-{3}.ps:8500, other:1"}

    role = role_from_environment(environ)

    assert role.endpoints == ("ps-0.ps:8500", "ps-1.ps:8500", "ps-2.ps:8500", "other:1")


def test_repeated_endpoint_is_refused():
    with pytest.raises(RoleError, match="has a:1 more than once"):
        role_from_environment(WORKER | {"PADDLE_PSERVERS_IP_PORT_LIST": "a:1,b:1,a:1"})


@pytest.mark.parametrize(
    "name",
    [
        HETER_LIST,
        "PADDLE_HETER_TRAINER_IP_PORT_LIST",
        "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST",
    ],
)
@pytest.mark.parametrize("empty", [{}, {HETER_LIST: ""}])
def test_heter_trainers_are_in_a_list_of_either_generation(name, empty):
    listed = empty | {name: "h-0:9000, h-1:9000"}
    heter = ("h-0:9000", "h-1:9000")

    roles = [role_from_environment({**SERVER, **listed}), role_from_environment(WORKER | listed)]

    assert [role.heter_endpoints for role in roles] == [heter, heter]
    assert [role.members.total for role in roles] == [4, 4]
    first = {
        key: text for key, text in HETER.items() if not key.startswith(("PADDLE_ALL", "STAGE"))
    }
    role = role_from_environment(first | listed)
    assert isinstance(role, HeterRole)
    assert (role.heter_endpoints, role.heter_index, role.worker_index) == (heter, 1, 3)
    assert (role.endpoint, role.port, role.members.total) == ("h-1:9000", 9000, 4)
    assert role.members.name(role.worker_index) == "heter trainer 1"


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        ([0, 1], "workers [0, 1]"),
        ([1, 2, 3], "workers [1], heter trainer 0, heter trainer 1"),
        ([3], "heter trainer 1"),
        ([4], "workers [4]"),  # of another job
        ([], "workers []"),
    ],
)
def test_members_are_named_by_their_kind(numbers: list[int], names: str) -> None:
    assert Members(2, 2).names(numbers) == names


@pytest.mark.parametrize(
    ("variables", "device"),
    [
        ({}, "cpu"),
        ({"FLAGS_selected_gpus": "0"}, "cpu"),  # the first generation always sets it
        ({"HETER_DEVICE_TYPE": "cpu", "FLAGS_selected_gpus": "1"}, "cpu"),
        ({"HETER_DEVICE_TYPE": "GPU"}, "cuda"),
        ({"HETER_DEVICE_TYPE": "gpu", "FLAGS_selected_gpus": "3,4"}, "cuda:3"),
    ],
)
def test_heter_trainer_has_its_device(variables, device):
    assert role_from_environment(HETER | variables).device == device
