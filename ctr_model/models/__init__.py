"""Models, a family in each module, with the layers that are theirs alone."""
