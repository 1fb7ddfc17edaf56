"""Does what a runner asks of a device, in one way whatever it is driven with."""
