"""Carries out the decisions of `tiers.book` on the event loop."""
