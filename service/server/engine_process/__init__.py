"""Runs the engine in a process of its own, and watches it from the HTTP process."""
