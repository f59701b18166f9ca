"""Tiers below host memory: a disk, and shared stores.

A tier copies blocks between slots and its store. `book` decides which blocks it gets, and is
pure; `drive` runs on the event loop, calls the tiers and reports to `book`. Points in time
(`until_s`, `deadline_s`, `moved_s`) are of time.monotonic, unless a module says otherwise.
"""
