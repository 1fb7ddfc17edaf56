"""Prints tables and draws pictures of measurements."""
