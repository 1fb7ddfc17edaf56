"""Runs a server as a replica of Ray Serve."""
