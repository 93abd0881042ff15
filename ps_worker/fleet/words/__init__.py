"""Words of Paddle: roles, strategies and datasets, as scripts write them."""
