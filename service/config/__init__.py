"""Defines every option once: command line, environment, help."""
