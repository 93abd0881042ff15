"""Errors of jobs, data, servers and checkpoints; each says what is wrong, the value, and what to do.

A `SchemaError` and a `ModelInputError` are ValueErrors.
"""

from ctr_ps.ctr_model.parameters import ModelInputError
from ctr_ps.ctr_model.schema import SchemaError
from ctr_ps.protos import errors
from ctr_ps.protos.errors import *  # noqa: F403  the names are listed there

__all__ = ["ModelInputError", "SchemaError"]
__all__ += errors.__all__
