"""The port for metrics and a status page that each process may open."""
