"""What tiers in servers have in common, whatever the server speaks.

`tier` queues calls, and `workers` run their parts on a few threads; `client` says what a thread
asks of its server, `errors` what can go wrong with one; `health` knows when to try it again.
"""
