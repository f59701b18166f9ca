"""Copy engine `cuda`: copies between one device and the arena."""
