"""Carries requests to the engine of another process, and results back."""
