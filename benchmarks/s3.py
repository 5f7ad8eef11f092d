"""S3 clients side by side: botocore in threads (what `s3://` uses), s3fs, obstore.

    python benchmarks/s3.py [--server null|moto|URL] [--mib 512] [--part-mib 8] [--parallel 8]

`null` is a server of its own process that throws parts away and sends zeros, so it shows what a
client can do; `moto` is a slow one, and shows nothing but that it is. `--busy` adds a Python thread
that never rests, as a training loop does: what takes the GIL often then waits for it often. Clients
run one after the other, each in a process of its own; figures are MiB/s, and seconds of CPU that
the client took per GiB.
"""

# ruff: noqa: PLC0415 - each client is imported by the process that measures it

import argparse
import http.server
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time

import numpy as np

BUCKET, KEY = "bench", "folder/blob"
CLIENTS = ("penstock", "obstore", "s3fs")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "loopback",
    "AWS_SECRET_ACCESS_KEY": "loopback",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="null")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--part-mib", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.mib << 20)
    os.environ.update(ENVIRONMENT)
    if options.client:
        return measure(options)
    process, url = start(options)
    print(
        f"{options.server}: {options.mib} MiB in parts of {options.part_mib} MiB, "
        f"{options.parallel} at once, {os.cpu_count()} cores"
        f"{', with a busy thread' if options.busy else ''}"
    )
    try:
        for _ in range(options.rounds):
            for client in CLIENTS:
                arguments = [a for a in sys.argv[1:] if not a.startswith("--server")]
                arguments = [a for a in arguments if a != options.server]
                subprocess.run(
                    [sys.executable, __file__, *arguments, "--client", client, "--server", url],
                    check=True,
                )
    finally:
        if process is not None:
            process.kill()
            process.wait()
    return None


def start(options):
    if options.server not in ("null", "moto"):
        return None, options.server
    if options.server == "null":
        command = [sys.executable, __file__, "--serve", "--mib", str(options.mib)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return process, f"http://127.0.0.1:{int(process.stdout.readline())}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "1"},
    )
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.1)
    return process, f"http://127.0.0.1:{port}"


# -- clients ------------------------------------------------------------------------------------


def measure(options):
    size, part = options.mib << 20, options.part_mib << 20
    source = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    target = np.ones(size, np.uint8)
    write, read = globals()[f"{options.client}_client"](options, part)
    if options.busy:
        threading.Thread(target=spin, daemon=True).start()
    for what, task, data in (("write", write, source), ("read", read, target)):
        began, cpu = time.perf_counter(), sum(os.times()[:2])
        task(memoryview(data))
        seconds, cpu = time.perf_counter() - began, sum(os.times()[:2]) - cpu
        if options.busy:
            cpu = float("nan")  # mostly that of the busy thread
        print(
            f"  {options.client:9} {what:6} {options.mib / seconds:7.0f} MiB/s "
            f"{cpu * 1024 / options.mib:6.2f} s/GiB",
            flush=True,
        )
    os._exit(0)


def spin():
    count = 0
    while True:
        count += 1


def penstock_client(options, part, *, checksums=True):
    from penstock.backends.fsspec import FsspecBackend, FsspecConfig
    from penstock.core.types import ReadRequest, WriteRequest

    make_bucket(options.server)
    backend = FsspecBackend(
        FsspecConfig(
            url=f"s3://{BUCKET}/folder",
            options={"endpoint_url": options.server},
            part_bytes=part,
            parallel=options.parallel,
            conditional_put="yes",
            checksums=checksums,
        )
    )
    backend.delete(["blob"])

    def write(data):
        writer = backend.create("blob", size_hint=data.nbytes)
        # As the engine does: chunks of 16 MiB that do not begin where parts do.
        step = 16 << 20
        cuts = [0, *range(3 << 20, data.nbytes, step), data.nbytes]
        requests = [WriteRequest(a, (data[a:b],)) for a, b in itertools.pairwise(cuts)]
        futures = [
            backend.submit_write(writer, requests[at : at + 4]) for at in range(0, len(requests), 4)
        ]
        for future in futures:
            future.result()
        writer.seal(data.nbytes)

    def read(data):
        backend.read([ReadRequest("blob", 0, data)])

    return write, read


def obstore_client(options, part):
    import obstore
    from obstore.store import S3Store

    make_bucket(options.server)
    store = S3Store(
        BUCKET,
        endpoint=options.server,
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": True},
    )

    def write(data):
        pieces = (data[at : at + part] for at in range(0, data.nbytes, part))
        obstore.put(
            store,
            KEY,
            pieces,
            use_multipart=True,
            chunk_size=part,
            max_concurrency=options.parallel,
        )

    def read(data):
        def piece(at):
            found = obstore.get_range(store, KEY, start=at, end=min(at + part, data.nbytes))
            np.copyto(np.frombuffer(data, np.uint8)[at : at + part], np.frombuffer(found, np.uint8))

        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(piece, range(0, data.nbytes, part)))

    return write, read


def s3fs_client(options, part):
    import s3fs

    make_bucket(options.server)
    fs = s3fs.S3FileSystem(
        endpoint_url=options.server,
        use_listings_cache=False,
        max_concurrency=options.parallel,
        config_kwargs={
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"payload_signing_enabled": False},
        },
    )

    def write(data):
        with fs.open(f"{BUCKET}/{KEY}", "wb", block_size=part * options.parallel) as stream:
            for at in range(0, data.nbytes, part):
                stream.write(data[at : at + part])

    def read(data):
        starts = list(range(0, data.nbytes, part))
        stops = [min(at + part, data.nbytes) for at in starts]
        found = fs.cat_ranges(
            [f"{BUCKET}/{KEY}"] * len(starts), starts, stops, batch_size=options.parallel
        )
        for at, piece in zip(starts, found, strict=True):
            np.copyto(np.frombuffer(data, np.uint8)[at : at + part], np.frombuffer(piece, np.uint8))

    return write, read


def make_bucket(url):
    import botocore.session

    api = botocore.session.Session().create_client("s3", endpoint_url=url)
    api.create_bucket(Bucket=BUCKET)
    api.close()


# -- the server that keeps nothing --------------------------------------------------------------


class Null(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    size = 0
    zeros = memoryview(bytes(64 << 20))

    def log_message(self, *_):
        pass

    def answer(self, status=200, text=b"", **headers):
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("length", str(len(text))))
        self.end_headers()
        self.wfile.write(text)

    def do_PUT(self):
        left = int(self.headers.get("Content-Length") or 0)
        scratch = memoryview(bytearray(1 << 20))
        while left:
            left -= self.rfile.readinto(scratch[: min(left, len(scratch))])
        self.answer(ETag='"0123456789abcdef0123456789abcdef"')

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "uploads" in self.path:
            text = (
                "<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key>"
                "<UploadId>u</UploadId></InitiateMultipartUploadResult>"
            )
            Null.written = False
        elif "delete" in self.path:
            text = "<DeleteResult></DeleteResult>"
            Null.written = False
        else:
            text = (
                "<CompleteMultipartUploadResult><Key>k</Key><ETag>&quot;e&quot;</ETag>"
                "</CompleteMultipartUploadResult>"
            )
            Null.written = True
        self.answer(text=text.encode(), Content_Type="application/xml")

    def do_HEAD(self):
        found = getattr(Null, "written", False)
        self.send_response_only(200 if found else 404)
        self.send_header("Content-Length", str(self.size if found else 0))
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.send_header("ETag", '"e"')
        self.end_headers()

    def do_GET(self):
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not match:
            told = b"<IsTruncated>false</IsTruncated>"
            return self.answer(text=b"<ListBucketResult>%s</ListBucketResult>" % told)
        first, last = int(match[1]), min(int(match[2]), self.size - 1)
        self.send_response_only(206)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Content-Range", f"bytes {first}-{last}/{self.size}")
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.send_header("ETag", '"e"')
        self.end_headers()
        self.connection.sendall(self.zeros[: last - first + 1])
        return None


def serve(size):
    Null.size = size
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Null)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
