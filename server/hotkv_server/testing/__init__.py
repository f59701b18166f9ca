"""Test doubles and contract suites, which ship with the server so that other projects can use them.
A contract suite is the checks that each implementation of an interface must pass."""
