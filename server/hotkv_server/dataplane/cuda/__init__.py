"""Copy engine `cuda`: copies between a device and the arena."""
