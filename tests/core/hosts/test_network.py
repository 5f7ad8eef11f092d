"""A rank finds the address by which ranks on other machines reach it."""

import ipaddress

import pytest

from penstock.core.hosts.network import own_address


def test_the_address_is_the_one_on_the_way_to_the_store_of_the_job():
    for address in ("127.0.0.1", "::1"):
        assert own_address(address, None) == address
    assert ipaddress.ip_address(own_address("localhost", None)).is_loopback
    ipaddress.ip_address(own_address(None, None))


def test_the_address_is_of_the_network_that_is_named():
    assert own_address(None, "127.0.0.0/8") == "127.0.0.1"
    assert own_address("203.0.113.1", "127.1.2.3/8") == "127.0.0.1"
    with pytest.raises(OSError, match=r"203\.0\.113\.0/24"):
        own_address("127.0.0.1", "203.0.113.0/24")
