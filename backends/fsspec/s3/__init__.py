"""S3, and every store that speaks its protocol: used by `fsspec` for `s3://`.

Holds requests by botocore, parts and multipart uploads, and S3's errors. The parent package has
what S3 shares with fsspec's file systems: retries, ranges, the life of a writer.
"""
