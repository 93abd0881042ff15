"""The contract: everything a server and a worker must agree on byte for byte."""

import os

# gRPC's C core writes lines of its own to stderr, in no format of ours, as of each failed handshake; what
# fails is told by calls, too. It reads this as it is imported, and processes of ours import `protos` before.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# A forked child, as the worker of a DataLoader, makes no calls. Without this gRPC starts its threads again
# there, which ends by an abort now and then (grpcio 1.85).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
