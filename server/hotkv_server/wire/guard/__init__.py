"""Checks that each gRPC call must pass before its service receives it. They identify the peer,
bound the work that clients cause, and record calls of operators in the audit log."""
