"""Finds the address by which ranks on other machines reach this one."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

# A port of a datagram socket that is never sent to: the kernel then says by which address it would.
_ANY_PORT = 9
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
