"""Test doubles and contract suites, which ship with the server so that other projects can use them.
A contract suite consists of the checks that every implementation of an interface must pass."""
