"""Pins the blocks of running requests in host memory, where engines read them, so that a context
may exceed the device's memory. See README.md."""
