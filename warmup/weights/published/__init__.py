"""Publishes prepared weights to a store, and brings them from there to machines that never saw the model."""
