"""What a server binds; that it runs is tested as a process (tests/integration/test_server_process.py)."""

import pytest

from ctr_ps.ps_server.rpc.run import default_bind


@pytest.mark.parametrize(
    ("endpoint", "bind"),
    [
        ("127.0.0.1:8500", "127.0.0.1"),
        ("127.0.1.1:8500", "127.0.1.1"),
        ("localhost:8500", "localhost"),
        ("[::1]:8500", "::1"),
        ("10.0.0.7:8500", "0.0.0.0"),
        ("[fd00::7]:8500", "::"),
        ("ps-server-0.ps-server:8500", "0.0.0.0"),
    ],
)
def test_only_a_loopback_endpoint_is_bound_as_it_is(endpoint, bind):
    assert default_bind(endpoint) == bind
