"""A saved model as a store to evaluate: rows are read from the files of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

from ctr_ps.protos.errors import CheckpointError, ProtocolError
from ctr_ps.protos.futures import Answered
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import Future, Missing, Pulled, Version
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel


@dataclass(frozen=True, slots=True)
class SavedStore:
    """A saved model as a `ParameterReader`, always at version 0."""

    saved: SavedModel

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        """See `ParameterReader`; only with `Missing.ZEROS`."""
        if missing is not Missing.ZEROS:
            raise ProtocolError(f"keys without a saved row read as zeros, not as {missing.name}")
        return Answered(Pulled({name: self.saved.read(name, keys[name]) for name in keys}, 0))

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """See `ParameterReader`."""
        for name, vector in into.items():
            saved = self.saved.dense.get(name)
            if saved is None or saved.shape != vector.shape:
                raise CheckpointError(
                    f"checkpoint {self.saved.checkpoint.url} has no dense block {name!r} of length "
                    f"{vector.size}: it belongs to another model"
                )
            vector[:] = saved
        return Answered(0)
