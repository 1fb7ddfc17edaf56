"""Serves probes, metrics, the start and the page."""
