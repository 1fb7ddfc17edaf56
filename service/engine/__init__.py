"""Schedules requests onto rows of a batch and steps them on the device thread."""
