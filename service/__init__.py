"""Serves a captioner's warm callables over HTTP: scheduling, processes, metrics and the command line."""
