"""An S3 server on loopback that keeps objects in memory, for `s3.py`.

    python benchmarks/s3_store.py [--latency-ms 20] [--mb-per-s 500]

Prints its port, and serves until it is killed. It supports the requests of the clients in `s3.py`,
and leaves them most of the CPU: it checks neither signatures nor checksums, and its ETags are
counters, not hashes. Every bucket exists.

It sleeps `--latency-ms` before each answer. `--mb-per-s` (MB are 10^6 bytes) limits each direction,
over all connections together. `GET /-/counts` returns the requests and body bytes since the last
`POST /-/reset`, which also deletes all objects.
"""

import argparse
import bisect
import email.utils
import http.server
import itertools
import json
import re
import socket
import threading
import time
import urllib.parse
from collections import Counter
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

import numpy as np

PIECE = 256 << 10  # bytes that pass at once
BURST_S = 0.005  # the most that follows a late sleep at once


class Rate:
    """Bytes per second over all connections, in one direction."""

    def __init__(self, mb_per_s):
        self.per_s, self.free, self.lock = mb_per_s * 1e6, 0.0, threading.Lock()

    def pieces(self, count):
        """Yield cuts of `count` bytes, each when it may pass."""
        step = PIECE if self.per_s else max(count, 1)
        for at in range(0, count, step):
            stop = min(at + step, count)
            if self.per_s:
                with self.lock:
                    now = time.monotonic()
                    self.free = max(now - BURST_S, self.free) + (stop - at) / self.per_s
                    pause_s = self.free - now
                time.sleep(max(0.0, pause_s))
            yield at, stop


class Blob:
    """The bytes of an object: its parts in order."""

    numbers = itertools.count(1)

    def __init__(self, parts):
        self.parts = parts
        self.stops = list(itertools.accumulate(part.nbytes for part in parts))
        self.size = self.stops[-1] if parts else 0
        self.etag, self.time_s = f'"{next(self.numbers):032x}"', time.time()

    def views(self, start, stop):
        for index in range(bisect.bisect_right(self.stops, start), len(self.parts)):
            first = self.stops[index] - self.parts[index].nbytes
            if first >= stop:
                return
            yield self.parts[index][max(0, start - first) : stop - first]


class Failed(Exception):  # noqa: N818 - an answer, not a server fault
    def __init__(self, status, code):
        super().__init__(code)
        self.status = status


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = 64 << 10
    lock = threading.Lock()
    blobs, uploads, counts = {}, {}, Counter()  # by bucket/key, by number; under the lock
    latency_s, rate_in, rate_out = 0.0, Rate(0), Rate(0)

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True  # the client has its bytes

    def serve(self):
        """Serve one request: the method is named for HTTP's method, and object or bucket."""
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        self.key = f"{self.bucket}/{key}"
        body = self.body()
        if self.bucket == "-":
            if key == "reset":
                for kept in (self.blobs, self.uploads, self.counts):
                    kept.clear()
            self.answer(200, json.dumps(self.counts))
            return
        self.count(**{self.command: 1})
        try:
            getattr(self, f"{self.command.lower()}_{'object' if key else 'bucket'}")(body)
        except Failed as failed:
            text = f"<Error><Code>{failed}</Code><Message>{failed}</Message></Error>"
            self.answer(failed.status, text)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve  # noqa: N815 - names of http.server

    def count(self, **counts):
        with self.lock:
            self.counts.update(counts)

    def body(self):
        """Return the body, filled in few calls without the GIL."""
        view = memoryview(np.empty(int(self.headers.get("Content-Length") or 0), np.uint8))
        for start, stop in self.rate_in.pieces(view.nbytes):
            at = start
            while at < stop:
                # Bytes that came with the headers are first.
                if at == 0:
                    got = self.rfile.readinto1(view[:stop])
                else:
                    got = self.connection.recv_into(view[at:stop], 0, socket.MSG_WAITALL)
                if not got:
                    raise ConnectionResetError
                at += got
        self.count(bytes_in=view.nbytes)
        return [view]

    def answer(self, status=200, text="", **headers):
        data = text.encode()
        self.head(status, len(data), **headers)
        if self.command != "HEAD":
            self.wfile.write(data)

    def head(self, status, length, **headers):
        time.sleep(self.latency_s)
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def say(self, root, text):
        self.answer(200, f"<{root}>{text}</{root}>", Content_Type="application/xml")

    def found(self, key):
        if key not in self.blobs:
            raise Failed(404, "NoSuchKey")
        return self.blobs[key]

    # -- objects --------------------------------------------------------------------------------

    def get_object(self, _):
        blob = self.found(self.key)
        start, stop, status = 0, blob.size, 200
        modified = email.utils.formatdate(blob.time_s, usegmt=True)
        about = {"ETag": blob.etag, "Last_Modified": modified, "Accept_Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first, last = asked.groups()
            start = int(first) if first else max(0, blob.size - int(last))
            stop = min(int(last) + 1, blob.size) if first and last else blob.size
            if start >= stop:
                raise Failed(416, "InvalidRange")
            status, about["Content_Range"] = 206, f"bytes {start}-{stop - 1}/{blob.size}"
        self.head(status, stop - start, **about)
        if self.command == "HEAD":
            return
        for view in blob.views(start, stop):
            for first, last in self.rate_out.pieces(view.nbytes):
                self.connection.sendall(view[first:last])
        self.count(bytes_out=stop - start)

    head_object = get_object

    def put_object(self, body):
        source = self.headers.get("x-amz-copy-source")
        if "partNumber" in self.query:
            blob = Blob(body)
            self.upload()[int(self.query["partNumber"])] = blob
        else:
            blob = self.put(self.found(urllib.parse.unquote(source).lstrip("/")).parts
                            if source else body)  # fmt: skip
        text = f"<CopyObjectResult><ETag>{blob.etag}</ETag></CopyObjectResult>" if source else ""
        self.answer(200, text, ETag=blob.etag)

    def put(self, parts):
        with self.lock:
            if self.headers.get("If-None-Match") == "*" and self.key in self.blobs:
                raise Failed(412, "PreconditionFailed")
            blob = self.blobs[self.key] = Blob(parts)
        return blob

    def delete_object(self, _):
        self.uploads.pop(self.query.get("uploadId"), None)
        if "uploadId" not in self.query:
            self.blobs.pop(self.key, None)
        self.answer(204)

    def upload(self):
        key, parts = self.uploads.get(self.query["uploadId"], (None, {}))
        if key != self.key:
            raise Failed(404, "NoSuchUpload")
        return parts

    def post_object(self, body):
        named = tags(Bucket=self.bucket, Key=self.key.partition("/")[2])
        if "uploads" in self.query:
            number = f"upload-{next(Blob.numbers)}"
            self.uploads[number] = self.key, {}
            self.say("InitiateMultipartUploadResult", named + tags(UploadId=number))
            return
        parts = self.upload()
        numbers = [int(number) for number in texts(body, "PartNumber")]
        if not numbers or any(number not in parts for number in numbers):
            raise Failed(400, "InvalidPart")
        blob = self.put([part for n in numbers for part in parts[n].parts])
        self.uploads.pop(self.query["uploadId"], None)
        self.say("CompleteMultipartUploadResult", named + tags(ETag=blob.etag))

    # -- buckets --------------------------------------------------------------------------------

    def head_bucket(self, _):
        self.answer()

    def post_bucket(self, body):
        keys = texts(body, "Key")
        for key in keys:
            self.blobs.pop(f"{self.bucket}/{key}", None)
        self.say("DeleteResult", "".join(f"<Deleted>{tags(Key=key)}</Deleted>" for key in keys))

    def get_bucket(self, _):
        if "uploads" in self.query:
            self.say("ListMultipartUploadsResult", tags(IsTruncated="false"))
            return
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        entries, skip = {}, len(self.bucket) + 1
        with self.lock:
            blobs = sorted(self.blobs.items())
        for full, blob in blobs:
            key = full[skip:]
            if not full.startswith(f"{self.bucket}/{prefix}"):
                continue
            stop = key.find(delimiter, len(prefix)) if delimiter else -1
            if stop >= 0:
                folder = tags(Prefix=key[: stop + len(delimiter)])
                entries[folder] = f"<CommonPrefixes>{folder}</CommonPrefixes>"
            else:
                made = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(blob.time_s))
                about = tags(Key=key, LastModified=made, ETag=blob.etag, Size=blob.size)
                entries[key] = f"<Contents>{about}<StorageClass>STANDARD</StorageClass></Contents>"
        # In one page: these benchmarks keep few objects.
        text = tags(Name=self.bucket, Prefix=prefix, KeyCount=len(entries), IsTruncated="false")
        self.say("ListBucketResult", text + "".join(entries.values()))


def tags(**values):
    return "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in values.items())


def texts(body, tag):
    root = ET.fromstring(b"".join(body))
    return [element.text for element in root.iter() if element.tag.rpartition("}")[2] == tag]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--mb-per-s", type=float, default=0.0)
    options = parser.parse_args()
    Handler.latency_s = options.latency_ms / 1e3
    Handler.rate_in, Handler.rate_out = Rate(options.mb_per_s), Rate(options.mb_per_s)
    http.server.ThreadingHTTPServer.request_queue_size = 128
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
