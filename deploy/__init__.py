"""How a cluster runs: the launcher, images, manifests. Imports nothing of the other packages."""
