"""Reads the hints that clients give with their requests: how the server should retain the request's
blocks, and to which client session (such as a conversation) the request belongs."""
