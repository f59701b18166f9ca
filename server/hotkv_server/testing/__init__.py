"""Test doubles, and contract suites: checks that every implementation of an interface must pass.
They ship with the server for other projects."""
