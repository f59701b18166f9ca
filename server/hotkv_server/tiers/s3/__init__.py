"""The tier in an S3 bucket, which many nodes can share.

`packs` lays out the blocks of a write as one object. `index` remembers the pack of each block, and
`lister` learns the packs from the bucket. `client` turns calls into requests, `bucket` makes them.
`epochs` makes a flush hold on all nodes.
"""
