"""`python -m ctr_ps`: the version, and the commands."""

from ctr_ps.protos.runtime.environment import own_version

if __name__ == "__main__":
    commands = "ps-data, ps-worker, ps-server, ps-launch, ps-ckpt, ps-serve, ps-cluster, ps-top"
    print(f"ctr-ps {own_version()}: {commands}")
