"""S3 on loopback, as a separate process: moto behind its real HTTP server.

moto gets only whole requests, and one at a time. Otherwise its check of `If-None-Match` would not
be atomic, as it is on S3.
"""

import io
import os
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing, contextmanager, suppress

BUCKET = "penstock-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIDLOOPBACK",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t-of-the-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def missing():
    """Return the missing package that the S3 tests need; None if there is none."""
    for name in ("botocore", "moto", "flask", "werkzeug"):
        try:
            __import__(name)
        except ImportError:
            return f"{name} (pip install 'penstock[dev]')"
    return None


@contextmanager
def running():
    """Start a server with one bucket, and give its URL."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "1"},
    )
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the S3 server did not start: {process.wait()}")
        url = f"http://127.0.0.1:{int(line)}"
        _await(url)
        make_bucket(url)
        yield url
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def client(url):
    """Return a plain client, which shows the objects that are really stored."""
    import botocore.session

    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )


def make_bucket(url):
    with closing(client(url)) as api:
        api.create_bucket(Bucket=BUCKET)


def _await(url):
    for _ in range(600):
        with suppress(OSError), urllib.request.urlopen(f"{url}/moto-api/"):
            return
        time.sleep(0.05)
    raise RuntimeError("the S3 server does not answer")


class _OneAtATime:
    def __init__(self, app):
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ, start_response):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        if len(body) < length:  # the client has closed the connection
            start_response("400 Bad Request", [("Content-Length", "0")])
            return []
        environ["wsgi.input"] = io.BytesIO(body)
        with self._lock:
            return [b"".join(self._app(environ, start_response))]


def _serve():
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = _OneAtATime(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    _serve()
