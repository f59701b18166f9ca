"""Test doubles and contract suites (checks that each implementation of an interface must pass).
They ship with the server, so that other projects can use them."""
