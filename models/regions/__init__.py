"""Lists the functions that are compiled, and holds the buffers that they work on."""
