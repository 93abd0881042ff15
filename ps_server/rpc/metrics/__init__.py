"""What a server has measured: of its calls, and of its store, in Prometheus' format."""
