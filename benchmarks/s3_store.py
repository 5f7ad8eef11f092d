"""An S3 server on loopback that keeps what it is given, in memory, for benchmarks.

    python benchmarks/s3_store.py [--latency-ms 20] [--mb-per-s 500]

Prints its port, and serves until it is killed. It knows what the clients in these benchmarks ask
for: objects (also ranges, copies, `If-None-Match: *`), multipart uploads, listings, batch deletes,
bodies that are `aws-chunked`. It checks neither signatures nor checksums, and its ETags count
instead of hashing, so that it takes little of the CPU that the client wants. Parts are kept as they
came, in memory that is used again; nothing is joined or copied.

On the two cores that it was written on, `obstore` of `s3_peers.py` moves 1.9 to 3 GB/s each way.

`--latency-ms` is slept before each answer, but not before `100 Continue`. `--mb-per-s` (MB are 10^6
bytes) bounds what comes in over all connections together, and likewise what goes out.
`GET /-/counts` tells requests and bytes of bodies since the last `POST /-/reset`, which also
forgets all objects.
"""

import argparse
import bisect
import email.utils
import http.server
import io
import itertools
import json
import re
import socket
import threading
import time
import urllib.parse
import weakref
from collections import Counter
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

import numpy as np

KEPT = 4 << 20  # a piece of memory; numpy asks for huge pages from here on
SMALL = 64 << 10  # bodies below have memory of their own
PIECE = 256 << 10  # so much at a time passes a bucket of tokens
BURST_S = 0.005  # what a sleep that took too long may catch up with
PAGE = 1000


class Rate:
    """Bytes per second over all connections, in one direction."""

    def __init__(self, mb_per_s):
        self.per_s = mb_per_s * 1e6
        self.free = 0.0  # when what was let through has passed
        self.lock = threading.Lock()

    def wait(self, count):
        with self.lock:
            now = time.monotonic()
            self.free = max(now - BURST_S, self.free) + count / self.per_s
            pause = self.free - now
        if pause > 0:
            time.sleep(pause)

    def pieces(self, count):
        """Cuts of `count` bytes, each handed out when it may pass."""
        step = PIECE if self.per_s else max(count, 1)
        for at in range(0, count, step):
            stop = min(at + step, count)
            if self.per_s:
                self.wait(stop - at)
            yield at, stop


class Memory:
    """Pieces of memory that are used again: pages that are new cost more than the bytes in them."""

    def __init__(self):
        self.free = []

    def touch(self, size):
        pieces = [np.empty(KEPT, np.uint8) for _ in range(0, size, KEPT)]
        for piece in pieces:
            piece.fill(1)
        self.free += pieces

    def take(self, size):
        """Arrays of `size` bytes together; each comes back once nothing refers to it."""
        if size < SMALL:
            return [np.empty(size, np.uint8)]
        return [self.piece(min(KEPT, size - at)) for at in range(0, size, KEPT)]

    def piece(self, size):
        try:
            whole = self.free.pop()
        except IndexError:
            whole = np.empty(KEPT, np.uint8)
        view = whole[:size]
        weakref.finalize(view, self.free.append, whole)
        return view


class Blob:
    """The bytes of an object: parts in their order."""

    def __init__(self, parts, number):
        self.parts = parts
        self.stops = list(itertools.accumulate(part.nbytes for part in parts))
        self.size = self.stops[-1] if parts else 0
        self.etag = f'"{number:032x}"'
        self.time_s = time.time()

    def views(self, start, stop):
        for index in range(bisect.bisect_right(self.stops, start), len(self.parts)):
            first = self.stops[index] - self.parts[index].nbytes
            if first >= stop:
                return
            yield self.parts[index][max(0, start - first) : stop - first]


@dataclass
class Upload:
    key: str
    time_s: float = field(default_factory=time.time)
    parts: dict = field(default_factory=dict)


class Objects:
    """All buckets; keys are `bucket/key`."""

    def __init__(self):
        self.lock = threading.Lock()  # of all that follows
        self.blobs = {}
        self.uploads = {}
        self.numbers = itertools.count(1)
        self.counts = Counter()

    def put(self, key, parts, *, exclusive):
        """The blob, or None if the name is taken."""
        with self.lock:
            if exclusive and key in self.blobs:
                return None
            blob = self.blobs[key] = Blob(parts, next(self.numbers))
            return blob

    def count(self, **counts):
        with self.lock:
            self.counts.update(counts)

    def reset(self):
        with self.lock:
            self.blobs.clear()
            self.uploads.clear()
            self.counts.clear()


class Failed(Exception):  # noqa: N818 - the answer, not a fault of the server
    def __init__(self, status, code):
        super().__init__(code)
        self.status = status


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = 64 << 10
    memory, objects = Memory(), Objects()
    latency_s = 0.0
    rate_in, rate_out = Rate(0), Rate(0)

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True  # the client has what it wanted

    def serve(self):
        """One request; the method of the class is that of HTTP and whether there is a key."""
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        self.key = f"{self.bucket}/{key}"
        body = self.body()
        if self.bucket == "-":
            return self.about_itself(key)
        self.objects.count(**{self.command: 1})
        kind = "object" if key else "bucket"
        try:
            getattr(self, f"{self.command.lower()}_{kind}")(body)
        except Failed as failed:
            text = f"<Error><Code>{failed}</Code><Message>{failed}</Message></Error>"
            self.answer(failed.status, text)
        return None

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve  # noqa: N815 - names of http.server

    def about_itself(self, what):
        if what == "reset":
            self.objects.reset()
        self.answer(200, json.dumps(self.objects.counts))

    # -- requests and answers -------------------------------------------------------------------

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            views = [memoryview(b"".join(self.chunks(self.rfile)))]
        else:
            views = self.take(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            views = [memoryview(b"".join(self.chunks(io.BytesIO(b"".join(views)), limit=False)))]
        self.objects.count(bytes_in=sum(view.nbytes for view in views))
        return views

    def take(self, length):
        """The body in pieces, filled by few calls that do not hold the GIL."""
        views = [memoryview(array) for array in self.memory.take(length)]
        for index, view in enumerate(views):
            for start, stop in self.rate_in.pieces(view.nbytes):
                at = start
                while at < stop:
                    # What was read along with the headers comes first.
                    if index == at == 0:
                        got = self.rfile.readinto1(view[:stop])
                    else:
                        got = self.connection.recv_into(view[at:stop], 0, socket.MSG_WAITALL)
                    if not got:
                        raise ConnectionResetError
                    at += got
        return views

    def chunks(self, stream, *, limit=True):
        while size := int(stream.readline().partition(b";")[0], 16):
            for start, stop in self.rate_in.pieces(size) if limit else [(0, size)]:
                yield stream.read(stop - start)
            stream.readline()
        while stream.readline().strip():
            pass  # a trailer

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

    def found(self, key):
        blob = self.objects.blobs.get(key)
        if blob is None:
            raise Failed(404, "NoSuchKey")
        return blob

    # -- objects --------------------------------------------------------------------------------

    def get_object(self, _):
        if "uploadId" in self.query:
            return self.list_parts()
        blob = self.found(self.key)
        start, stop, status, extra = 0, blob.size, 200, {}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked:
            start, stop = _range(asked, blob.size)
            if start >= stop:
                raise Failed(416, "InvalidRange")
            status, extra = 206, {"Content_Range": f"bytes {start}-{stop - 1}/{blob.size}"}
        self.head(status, stop - start, **_about(blob), **extra)
        if self.command == "HEAD":
            return None
        for view in blob.views(start, stop):
            for first, last in self.rate_out.pieces(view.nbytes):
                self.connection.sendall(view[first:last])
        self.objects.count(bytes_out=stop - start)
        return None

    head_object = get_object

    def put_object(self, body):
        if "partNumber" in self.query:
            upload = self.upload()
            upload.parts[int(self.query["partNumber"])] = Blob(body, next(self.objects.numbers))
            return self.answer(ETag=upload.parts[int(self.query["partNumber"])].etag)
        parts, source = body, self.headers.get("x-amz-copy-source")
        if source:
            parts = self.found(urllib.parse.unquote(source).lstrip("/")).parts
        blob = self.put(parts)
        text = f"<CopyObjectResult><ETag>{blob.etag}</ETag></CopyObjectResult>" if source else ""
        return self.answer(200, text, ETag=blob.etag)

    def put(self, parts):
        exclusive = self.headers.get("If-None-Match") == "*"
        blob = self.objects.put(self.key, parts, exclusive=exclusive)
        if blob is None:
            raise Failed(412, "PreconditionFailed")
        return blob

    def delete_object(self, _):
        if "uploadId" in self.query:
            self.upload()
            self.objects.uploads.pop(self.query["uploadId"], None)
        else:
            self.objects.blobs.pop(self.key, None)
        self.answer(204)

    # -- uploads --------------------------------------------------------------------------------

    def upload(self):
        upload = self.objects.uploads.get(self.query["uploadId"])
        if upload is None or upload.key != self.key:
            raise Failed(404, "NoSuchUpload")
        return upload

    def post_object(self, body):
        if "uploads" in self.query:
            number = f"upload-{next(self.objects.numbers)}"
            self.objects.uploads[number] = Upload(self.key)
            return self.say("InitiateMultipartUploadResult", self.named(UploadId=number))
        upload = self.upload()
        numbers = [int(e.text) for e in ET.fromstring(b"".join(body)).iter() if _is_number(e)]
        if not numbers or any(number not in upload.parts for number in numbers):
            raise Failed(400, "InvalidPart")
        blob = self.put([part for n in numbers for part in upload.parts[n].parts])
        self.objects.uploads.pop(self.query["uploadId"], None)
        return self.say("CompleteMultipartUploadResult", self.named(ETag=blob.etag))

    def list_parts(self):
        parts = (
            _tags(PartNumber=n, LastModified=_iso(p.time_s), ETag=p.etag, Size=p.size)
            for n, p in sorted(self.upload().parts.items())
        )
        text = "".join(f"<Part>{part}</Part>" for part in parts)
        self.say("ListPartsResult", f"<IsTruncated>false</IsTruncated>{text}")

    # -- buckets --------------------------------------------------------------------------------

    def put_bucket(self, _):
        self.answer()

    head_bucket = put_bucket

    def post_bucket(self, body):
        keys = [e.text for e in ET.fromstring(b"".join(body)).iter() if _local(e) == "Key"]
        for key in keys:
            self.objects.blobs.pop(f"{self.bucket}/{key}", None)
        deleted = (f"<Deleted>{_tags(Key=key)}</Deleted>" for key in keys)
        self.say("DeleteResult", "".join(deleted))

    def get_bucket(self, _):
        if "uploads" in self.query:
            return self.list_uploads()
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        entries = self.entries(prefix, delimiter, after)
        limit = min(int(self.query.get("max-keys") or PAGE), PAGE)
        page = entries[:limit]
        text = _tags(Name=self.bucket, Prefix=prefix, KeyCount=len(page))
        text += _tags(IsTruncated=str(len(page) < len(entries)).lower())
        if 0 < len(page) < len(entries):
            text += _tags(NextContinuationToken=page[-1][0])
        return self.say("ListBucketResult", text + "".join(entry for _, entry in page))

    def entries(self, prefix, delimiter, after):
        """Names behind `after`, objects and folders, with the XML of each."""
        skip = len(self.bucket) + 1
        with self.objects.lock:
            blobs = sorted(self.objects.blobs.items())
        found = {}
        for full, blob in blobs:
            key = full[skip:]
            if not full.startswith(f"{self.bucket}/{prefix}"):
                continue
            stop = key.find(delimiter, len(prefix)) if delimiter else -1
            if stop >= 0:
                key = key[: stop + len(delimiter)]
                text = f"<CommonPrefixes>{_tags(Prefix=key)}</CommonPrefixes>"
            else:
                about = _tags(
                    Key=key, LastModified=_iso(blob.time_s), ETag=blob.etag, Size=blob.size
                )
                text = f"<Contents>{about}<StorageClass>STANDARD</StorageClass></Contents>"
            if key > after:
                found[key] = text
        return list(found.items())

    def list_uploads(self):
        skip, prefix = len(self.bucket) + 1, self.query.get("prefix", "")
        with self.objects.lock:
            uploads = sorted(self.objects.uploads.items())
        text = "".join(
            f"<Upload>{_tags(Key=u.key[skip:], UploadId=number, Initiated=_iso(u.time_s))}</Upload>"
            for number, u in uploads
            if u.key.startswith(f"{self.bucket}/{prefix}")
        )
        self.say("ListMultipartUploadsResult", text + _tags(IsTruncated="false"))

    # -- words ----------------------------------------------------------------------------------

    def named(self, **tags):
        return _tags(Bucket=self.bucket, Key=self.key.partition("/")[2], **tags)

    def say(self, root, text):
        self.answer(200, f"<{root}>{text}</{root}>", Content_Type="application/xml")


def _range(asked, size):
    first, last = asked.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(int(last) + 1, size) if last else size


def _about(blob):
    return {
        "ETag": blob.etag,
        "Last_Modified": email.utils.formatdate(blob.time_s, usegmt=True),
        "Accept_Ranges": "bytes",
        "Content_Type": "application/octet-stream",
    }


def _iso(time_s):
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time_s))


def _tags(**values):
    return "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in values.items())


def _local(element):
    return element.tag.rpartition("}")[2]


def _is_number(element):
    return _local(element) == "PartNumber"


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--mb-per-s", type=float, default=0.0)
    parser.add_argument("--touch-gb", type=float, default=0.0, help="memory to have ready")
    options = parser.parse_args()
    Handler.memory.touch(int(options.touch_gb * 1e9))
    Handler.latency_s = options.latency_ms / 1e3
    Handler.rate_in, Handler.rate_out = Rate(options.mb_per_s), Rate(options.mb_per_s)
    server = Server(("127.0.0.1", options.port), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
