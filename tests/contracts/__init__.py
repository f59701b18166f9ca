"""Suites that every implementation of an interface must pass."""
