"""Reports what happens: metrics, logs, traces."""
