"""Simulates a fleet of replicas that follows its load: what a fast start is worth."""
