"""Doubles and contract suites that ship with the server, for tests here and elsewhere."""
