"""Test doubles and contract suites. A contract suite is the checks that each implementation of an
interface must pass. They ship with the server, so that other projects can use them."""
