"""The copy engine for CUDA devices: copies between the memory of a device and the arena."""
