"""The tier in an S3 bucket, which many nodes can share.

`packs` lays out the blocks of a write as one object. `index` remembers the pack of each block, and
`lister` learns the packs from the bucket. `client` translates the tier's calls into operations on
the bucket, and `bucket` sends the HTTP requests. `epochs` stores a number in the bucket for each
key space; a flush raises it, so that all nodes honour the flush.
"""
