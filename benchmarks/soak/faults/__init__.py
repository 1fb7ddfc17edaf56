"""Injects faults: into clients, processes, stores and devices."""
