"""Looking at servers from outside of a job."""

import ctr_ps.protos  # noqa: F401  # before gRPC, which it silences
