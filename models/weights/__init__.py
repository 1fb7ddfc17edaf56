"""Reads a checkpoint's tensors and brings them to the device, in the layout that regions take."""
