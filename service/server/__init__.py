"""Starts the processes of a server and brings them to READY."""
