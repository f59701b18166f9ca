"""The tier in an S3 bucket, which many nodes can share.

`packs` lays the blocks of a write out as one object; `index` remembers which block lies in which
pack, and `lister` learns it from the bucket; `client` says what a call is in requests, `bucket`
makes them; `epochs` makes a flush count on all nodes.
"""
