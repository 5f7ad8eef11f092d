"""S3, and whatever speaks its protocol: the store that `fsspec` takes for `s3://`.

Here: requests by botocore, multipart uploads, errors of S3. What it shares with file systems of
fsspec (parts, retries, the life of a writer) is in the package above.
"""
