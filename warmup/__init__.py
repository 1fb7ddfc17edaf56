"""Turns weights into warm callables: buckets, backends, artifacts and the start itself. No HTTP, no Prometheus."""
