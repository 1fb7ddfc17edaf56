"""Measures the ways to compile a captioner."""
