"""Opens compiled packages through libtorch's C interface, without torch's Python module."""
