"""Measurements of snapcap beside its peers: `snapcap bench`, and `python -m benchmarks.NAME`."""
