"""Trains the demo model and paints its samples; no part of an installation."""
