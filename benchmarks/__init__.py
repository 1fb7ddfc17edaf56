"""Measures snapcap beside its peers: `snapcap bench`, and `python -m snapcap.benchmarks.ROOM.NAME`."""
