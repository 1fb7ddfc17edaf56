"""Makes, views, writes and copies the buffers of a device, in one way whatever they are made with."""
