"""Serves contexts that outgrow the device. README.md in this directory lists the modules."""
