"""The server as one state machine: events in, answers and changes of parameters out."""
