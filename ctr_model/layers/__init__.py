"""Layers: forward and backward passes into preallocated buffers."""
