"""Checks that each gRPC call must pass before its service receives it."""
