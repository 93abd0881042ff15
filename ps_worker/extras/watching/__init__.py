"""Looking at servers from outside of a job: their status, as lines, or as a screen that moves."""

import ctr_ps.protos  # noqa: F401  # before gRPC, which it silences
