"""Serves the Open Inference Protocol, version 2."""
