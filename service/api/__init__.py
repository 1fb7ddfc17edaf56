"""Serves HTTP: contains the application, its APIs, and the code that the APIs share."""
