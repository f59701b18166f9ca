"""What tiers in remote stores share.

`tier` splits calls into parts (`calls`), which the threads of `workers` execute over a `Client`
each (`client`). `encoding` is a client that compresses; `values` is the layout of a block in a
key-value store.
"""
