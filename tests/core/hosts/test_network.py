"""Ranks of several hosts find an address of their own, and prove to each other what they are."""

import ipaddress

import pytest

from penstock.core.hosts.network import (
    Greeting,
    StrangerError,
    connecting_socket,
    listening_socket,
    own_address,
)


def greet(source, recipient, *, there=1, alter=lambda data: data):
    """Let two ranks greet each other; returns the rank that is admitted."""
    challenge = source.challenge()
    mine, his = recipient.claim(there), source.admit(challenge)
    next(mine)
    next(his)
    with pytest.raises(StopIteration) as claimed:
        mine.send(memoryview(challenge))
    claim, expected = claimed.value.value
    try:
        his.send(memoryview(alter(claim)))
    except StopIteration as admitted:
        rank, proof = admitted.value
        assert proof == expected
        return rank


def test_ranks_with_one_secret_admit_each_other():
    assert greet(Greeting(b"secret", 1), Greeting(b"secret", 7)) == 7


@pytest.mark.parametrize(
    "greeted",
    [
        lambda: greet(Greeting(b"secret", 1), Greeting(b"other", 7)),
        lambda: greet(Greeting(b"secret", 1), Greeting(b"secret", 7), there=2),
        lambda: greet(
            Greeting(b"secret", 1),
            Greeting(b"secret", 7),
            alter=lambda data: data[:32] + b"\x08" + data[33:],  # says that it is rank 8
        ),
    ],
    ids=["another secret", "another rank was meant", "another rank"],
)
def test_strangers_are_not_admitted(greeted):
    with pytest.raises(StrangerError):
        greeted()


def test_what_one_has_said_does_not_open_another_connection():
    source, recipient = Greeting(b"secret", 1), Greeting(b"secret", 7)
    overheard = []
    greet(source, recipient, alter=lambda data: overheard.append(data) or data)
    with pytest.raises(StrangerError):
        greet(source, recipient, alter=lambda _: overheard[0])


def test_the_address_is_the_one_on_the_way_to_the_store_of_the_job():
    assert own_address("127.0.0.1", None) == "127.0.0.1"
    assert ipaddress.ip_address(own_address("localhost", None)).is_loopback
    ipaddress.ip_address(own_address(None, None))


def test_the_address_is_of_the_network_that_is_named():
    assert own_address(None, "127.0.0.0/8") == "127.0.0.1"
    assert own_address("203.0.113.1", "127.1.2.3/8") == "127.0.0.1"
    with pytest.raises(OSError, match=r"203\.0\.113\.0/24"):
        own_address("127.0.0.1", "203.0.113.0/24")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_sockets_are_of_the_family_of_the_address_and_of_no_other_address(address):
    assert own_address(address, None) == address
    with listening_socket(address) as listener:
        assert listener.getsockname()[0] == address
        with connecting_socket(address, listener.getsockname()[1]) as line:
            listener.settimeout(10)
            found, _ = listener.accept()
            found.close()
            assert line.gettimeout() == 0
