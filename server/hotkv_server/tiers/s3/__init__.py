"""A shared tier in an S3 bucket.

`packs` lays out a write's blocks as one object; `index` knows which pack has which block,
`lister` which packs the bucket has; `client` does the tier's calls, `bucket` the requests.
`generation_objects` stores generations.
"""
