"""Servers come and go: who gets which shards, and the move of them."""

import ctr_ps.protos  # noqa: F401  # before gRPC, which it silences
