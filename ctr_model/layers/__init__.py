"""Layers, with forward and backward passes into preallocated buffers."""
