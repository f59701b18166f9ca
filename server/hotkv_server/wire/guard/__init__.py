"""Checks that run before every service: peers, limits, audit."""
