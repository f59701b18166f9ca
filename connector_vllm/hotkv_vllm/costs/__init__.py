"""Decides whether a hit is loaded from the server or its tokens are computed: whichever is
faster."""
