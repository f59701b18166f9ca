"""Compares slots with the bytes that were stored."""
