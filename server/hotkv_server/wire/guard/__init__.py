"""Checks that every call passes before its service sees it: they identify the peer, bound the work
that clients cause, and record calls of operators in the audit log."""
