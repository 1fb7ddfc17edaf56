"""Brings a model from a checkpoint and artifacts to serving: the order in which a start does what it does."""
