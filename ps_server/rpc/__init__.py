"""The gRPC shell around a store: the service, the life of a server, health."""
