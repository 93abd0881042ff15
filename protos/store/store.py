"""The seam between a trainer and its parameters, wherever they are: the sum of seven facets.

`ps_server.store.ParameterStore` is a store in process, `ps_worker.cluster.client.ClusterClient`
is one over gRPC; one contract suite (tests/contract) runs over both.

Calls that move data return futures: complete already in process, pending over the wire. Waiting for
one never lasts longer than the store's time limits, then it raises.
"""

from typing import Protocol

from ctr_ps.protos.store.admin import Admin
from ctr_ps.protos.store.changes import Changes
from ctr_ps.protos.store.checkpoints import Checkpoints
from ctr_ps.protos.store.coordination import Coordination
from ctr_ps.protos.store.exchange import Exchange
from ctr_ps.protos.store.parameters import Parameters
from ctr_ps.protos.store.state_transfer import StateTransfer


class Store(
    Parameters, StateTransfer, Changes, Coordination, Exchange, Checkpoints, Admin, Protocol
):
    """All parameters of a job: tables of rows and dense blocks. Thread-safe."""
