"""Waiting, ports, daemons and programs, for tests of every folder."""
