"""HTTP, scheduling and metrics around the warm callables."""
