"""Serves the probes, the metrics, the report of the start, and the pages."""
