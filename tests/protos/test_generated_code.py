"""The generated code is that of the protos."""

import pytest

pytest.importorskip("grpc_tools")


def test_generated_code_is_up_to_date() -> None:
    from ctr_ps.protos.wire.generate import stale_files

    assert stale_files() == []
