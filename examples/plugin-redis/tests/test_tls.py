"""Encrypted connections: the certificate is checked, and so is the name in it."""

import shutil
import socket
import subprocess

import pytest
from penstock.core.errors import StorageError
from servers import read, write


@pytest.fixture
def encrypted(own_server, tmp_path):
    """A port that takes TLS, and the certificate to trust."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    command += ["-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no")
    return own_server("--tls-port", str(port), *files), port, str(certificate)


def test_blobs_go_through_tls(encrypted):
    server, port, certificate = encrypted
    backend = server.open(url=f"rediss://localhost:{port}/0", ca_file=certificate)
    data = bytes(range(256)) * 40_000
    write(backend, "data/a.raw", data)
    assert read(backend, "data/a.raw", len(data)) == data
    assert backend.url == f"rediss://localhost:{port}/0/penstock"
    backend.close()


def test_another_certificate_or_name_is_refused(encrypted):
    server, port, certificate = encrypted
    for host, options in (("localhost", {}), ("127.0.0.1", {"ca_file": certificate})):
        with pytest.raises(StorageError, match="certificate"):
            server.open(url=f"rediss://{host}:{port}/0", retry_total_s=0, **options)
