"""Copy engine `cuda`: between one device and the arena."""
