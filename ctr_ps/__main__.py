"""`python -m ctr_ps`: the version, and the commands."""

from ctr_ps.protos.runtime.environment import own_version

print(
    f"ctr-ps {own_version()}: ps-data, ps-worker, ps-server, ps-launch, ps-ckpt, ps-serve, ps-top"
)
