"""Coordination of a job's workers, sans-IO: events in, decisions out; no wire, no tables."""
