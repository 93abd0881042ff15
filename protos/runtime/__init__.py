"""What every process sets up once: compiled kernels, their cache, the C allocator."""
