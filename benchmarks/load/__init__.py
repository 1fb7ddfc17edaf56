"""Measures a running server under load, and its engine alone."""
