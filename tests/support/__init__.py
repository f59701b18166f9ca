"""Helpers for the tests of all folders: waiting, free ports, server processes, external
programs."""
