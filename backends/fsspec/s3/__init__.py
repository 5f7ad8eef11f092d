"""S3 and compatible stores, which `fsspec` uses for `s3://`.

The package sends requests through botocore, writes multipart uploads, and maps S3's errors. The
parent package has the code that S3 shares with fsspec's file systems: retries, ranges, and the
states of a writer.
"""
