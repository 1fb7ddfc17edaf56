"""Runs and watches the processes that decode images."""
