"""Checks that every call passes before its service sees it: who the peer is, limits, and the audit
log."""
