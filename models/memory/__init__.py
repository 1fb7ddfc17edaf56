"""Makes the buffers of a device, writes and copies them, through one interface for every kind of tensor."""
