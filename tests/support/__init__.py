"""Waiting, ports, daemons and programs: what tests of every folder use."""
