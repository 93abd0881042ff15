"""Schemas: dense columns with their scaling, and slots."""

from ctr_ps.ctr_model.schema.dense_column import DenseColumn, SchemaError, Transform
from ctr_ps.ctr_model.schema.schema import Schema, criteo_schema

__all__ = ["DenseColumn", "Schema", "SchemaError", "Transform", "criteo_schema"]
