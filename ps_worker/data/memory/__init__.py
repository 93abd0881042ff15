"""Rows in memory, and how workers deal them to each other."""
