"""Decides in vLLM's scheduler: who attends sparsely, who may run, which blocks leave the device."""
