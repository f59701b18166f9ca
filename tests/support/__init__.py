"""Helpers of all tests' folders."""
