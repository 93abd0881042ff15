"""The contract: everything a server and a worker must agree on byte for byte."""
