"""Serves HTTP: the application, its APIs, and what all of them share."""
