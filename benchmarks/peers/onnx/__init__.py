"""Serves a captioner with ONNX Runtime, exported and optimised ahead of time."""
