"""Tiers below host memory: a disk and shared stores keep blocks that the arena can't hold.

A tier copies blocks between slots of the arena (the server's host memory) and its store. The
package `book` decides which blocks each tier gets, and is pure (no I/O). The package `drive` runs
on the event loop: it calls the tiers and reports their results to `book`.
"""
