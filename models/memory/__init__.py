"""Makes the buffers of a device, writes and copies them, in one way whatever they are made with."""
