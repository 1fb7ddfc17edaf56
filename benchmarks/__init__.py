"""Measurements of snapcap beside its peers; not installed. `python -m benchmarks.NAME` from the repository root."""
