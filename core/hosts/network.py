"""Sockets between ranks of several hosts: at which address, and only for ranks of the job."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

CHALLENGE_BYTES = 32
PROOF_BYTES = 32
_CLAIM = struct.Struct(f"<{CHALLENGE_BYTES}sI{PROOF_BYTES}s")
# A port of a datagram socket that is never sent to: the kernel then says by which address it would.
_ANY_PORT = 9
_BACKLOG = 256  # all ranks of a job connect at once; one that finds no room tries again later
# Of no machine (RFC 5737): the way there is the default route.
_ELSEWHERE = "192.0.2.1"


def own_address(host: str | None, network: str | None) -> str:
    """Return the address of this machine by which ranks on other machines reach it.

    Host names of clusters often stand for another network, or for this machine alone, so none is
    looked up: the kernel says which address it takes on the way there.

    Args:
        host: The machine of the job's store, which all ranks reach; None: there is none.
        network: The network to take, `10.1.0.0/16`; None: the one that leads to `host`.

    Raises:
        OSError: This machine has no address in `network`.
        ValueError: `network` is no network.
    """
    if network is not None:
        wanted = ipaddress.ip_network(network, strict=False)
        with suppress(OSError):  # no way there
            found = _address_towards(str(wanted.network_address + 1))
            if ipaddress.ip_address(found) in wanted:
                return found
        msg = f"this machine has no address in the network {network}: is rank_network right?"
        raise OSError(msg)
    if host is not None:
        found = _address_towards(host)
        if not ipaddress.ip_address(found).is_loopback or _is_loopback(host):
            return found
    try:  # the name of this machine stands for its loopback address here
        return _address_towards(_ELSEWHERE)
    except OSError:  # no network at all
        return "127.0.0.1"


def listening_socket(address: str) -> socket.socket:
    """Return a socket that listens at a free port of `address`; none of its calls waits.

    Raises:
        OSError: There is no such address here, or no socket.
    """
    line = _new_socket(address)
    try:
        line.bind((address, 0))
        line.listen(_BACKLOG)
    except OSError:
        line.close()
        raise
    return line


def connecting_socket(address: str, port: int) -> socket.socket:
    """Return a socket that has begun to connect; none of its calls waits.

    Raises:
        OSError: There is no socket, or no way to that address.
    """
    line = _new_socket(address)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.connect((address, port))
    except BlockingIOError:
        pass
    except OSError:
        line.close()
        raise
    return line


def accepted_socket(listener: socket.socket) -> socket.socket:
    """Return a socket to one that has connected.

    Raises:
        BlockingIOError: Nobody has.
        OSError: This process has no room for another socket.
    """
    line, _ = listener.accept()
    line.settimeout(0)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


class StrangerError(OSError):
    """The other end of a connection is no rank of this job, or keeps to no protocol."""


class Greeting:
    """Proves both ends of a connection to each other: both know the secret, and neither says it.

    Each step is a generator that yields how many bytes it needs, gets them, and returns what is to
    be sent, so that one thread can go through many at once.
    """

    def __init__(self, secret: bytes, rank: int) -> None:
        """Take what only the ranks of this job know, another one for each restore."""
        self._secret = secret
        self._rank = rank

    def challenge(self) -> bytes:
        """Return what the rank that listens sends first, another one for each connection."""
        return os.urandom(CHALLENGE_BYTES)

    def claim(self, source: int) -> Generator[int, memoryview, tuple[bytes, bytes]]:
        """Get the challenge of `source`, to which this rank has connected.

        Returns:
            What this rank has to send, and what `source` has to answer.
        """
        there, here = bytes((yield CHALLENGE_BYTES)), self.challenge()
        proof = self._proof(b"recipient", there, here, self._rank, source)
        expected = self._proof(b"source", there, here, self._rank, source)
        return _CLAIM.pack(here, self._rank, proof), expected

    def admit(self, challenge: bytes) -> Generator[int, memoryview, tuple[int, bytes]]:
        """Get the claim of one that has connected, and was sent `challenge`.

        Returns:
            Its rank, and what this rank has to answer.

        Raises:
            StrangerError: It does not know the secret.
        """
        there, rank, proof = _CLAIM.unpack((yield _CLAIM.size))
        expected = self._proof(b"recipient", challenge, there, rank, self._rank)
        if not hmac.compare_digest(proof, expected):
            msg = "one that connected does not know the secret of this job"
            raise StrangerError(msg)
        return rank, self._proof(b"source", challenge, there, rank, self._rank)

    def _proof(self, role: bytes, of_source: bytes, of_recipient: bytes, *ranks: int) -> bytes:
        names = b"/".join(b"%d" % rank for rank in ranks)
        said = b"\0".join((role, names, of_source + of_recipient))
        return hmac.digest(self._secret, said, "sha256")


def _new_socket(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    line = socket.socket(family, socket.SOCK_STREAM)
    line.settimeout(0)
    return line


def _address_towards(host: str) -> str:
    """Return the address that the kernel would send from; nothing is sent."""
    error: OSError | None = None
    for family, kind, protocol, _, there in socket.getaddrinfo(
        host, _ANY_PORT, type=socket.SOCK_DGRAM
    ):
        with socket.socket(family, kind, protocol) as line:
            try:
                line.connect(there)
            except OSError as failed:
                error = failed
                continue
            address: str = line.getsockname()[0]
            return address.partition("%")[0]
    raise error or OSError(f"{host} has no address")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
