"""Performs the actions that routers request by hints (retain, pin, demote, release or prefetch
blocks), and records the outcome of each action."""
