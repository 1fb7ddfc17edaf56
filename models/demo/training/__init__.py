"""Trains the demo model and paints its samples. Installations do not contain it."""
