"""Measures snapcap and its peers: `snapcap bench`, and `python -m snapcap.benchmarks.ROOM.NAME`."""
