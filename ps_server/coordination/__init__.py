"""How the workers of a job keep together: events in, decisions out; no wire, no tables."""
