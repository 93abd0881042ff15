"""The parameters of a server as they are at one moment, while others train."""
