"""Runs `snapcap caption`: captions files and folders with the server's engine, without the server."""
