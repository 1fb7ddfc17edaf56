"""Compiles packages in child processes, checks them, and publishes them as one set."""
