"""Runs `snapcap caption`: files and folders through the server's engine, without the server."""
