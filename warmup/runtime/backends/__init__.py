"""Region + bucket -> callable, one module a backend, one signature."""
