"""Accounts, outcomes and forecast. Pure: no clock, no I/O, no threads."""
