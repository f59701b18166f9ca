"""The copy engine for CUDA devices."""
