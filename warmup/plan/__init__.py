"""Decides what is going to run, before torch is imported."""
