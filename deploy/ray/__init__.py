"""Ray as the engine of `ps-launch`: the same processes, each owned by an actor; imported late."""
