"""Models of click-through rate: arrays in, arrays out."""
