"""Measures starts: this server beside the floor and its peers."""
