"""S3, and every store that speaks its protocol: used by `fsspec` for `s3://`.

Here: requests by botocore, parts and multipart uploads, errors of S3. The package above has what
S3 shares with the file systems of fsspec: retries, ranges, the life of a writer.
"""
