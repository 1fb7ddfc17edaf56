"""From weights to warm callables: buckets, backends, artifacts and the start itself. No HTTP, no Prometheus."""
