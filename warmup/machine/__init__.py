"""Asks the operating system and the driver what this machine is, and runs processes on it. No torch."""
