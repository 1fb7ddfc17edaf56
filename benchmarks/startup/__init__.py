"""Measures starts of snapcap, the floor and the peers."""
