"""The tier in an S3 bucket, which many nodes can share.

`packs` lays out the blocks of a write as one object, a pack. `index` remembers, in memory, which
pack has which block, and `lister` finds out which packs the bucket has. `client` translates the
tier's calls into operations on the bucket, and `bucket` sends the HTTP requests. `generations`
stores
the generation of each key space in the bucket: a number that a flush raises, so that all nodes
honour the flush.
"""
