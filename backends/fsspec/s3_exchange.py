"""One request and its answer on one connection, in few calls that do not hold the GIL."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.backends.fsspec.s3_answer import Answer, Response, response_of

if TYPE_CHECKING:
    import http.client
    import io
    from collections.abc import Callable, Sequence

CLOSED = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""A connection that the store has closed; also an end without an answer."""

_REDIRECT = 300

_IDLE_S = 30.0  # firewalls forget a connection that rests, and tell nobody


@dataclass(frozen=True, slots=True)
class Message:
    """A request: what is sent is the head, then the views one after the other."""

    method: str
    target: str
    headers: tuple[tuple[str, Any], ...]
    views: Sequence[memoryview]


class Connection:
    """One connection, on which one exchange runs at a time.

    Its socket has a time limit by Python, which makes it one that does not block, where each
    piece of a transfer takes the GIL; and one by the kernel, which counts while it does block.

    Args:
        place: Scheme, and host with port.
        client: Not connected yet.
        timeout_s: How long the store may take to go on.
        keep: Called once nothing is under way on it.
    """

    def __init__(
        self,
        place: tuple[str, str],
        client: http.client.HTTPConnection,
        *,
        timeout_s: float,
        keep: Callable[[Connection], None],
    ) -> None:
        self.place = place
        self._keep = keep
        self._client = client
        self._timeout_s = timeout_s
        self._rests_since_s = 0.0
        client.response_class = Response
        client.connect()
        self._socket: socket.socket = client.sock
        self._plain = not isinstance(self._socket, ssl.SSLSocket)
        self._socket.settimeout(timeout_s)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @property
    def usable(self) -> bool:
        """Whether it has not rested too long, and the store has neither closed it nor sent more."""
        if time.monotonic() - self._rests_since_s > _IDLE_S:
            return False
        return not self._heard()

    def exchange(self, message: Message) -> Answer:
        """Send a request; the head of the answer. Closed if there is none."""
        try:
            return self._exchange(message)
        except BaseException:
            self.close()
            raise

    def receive(self, target: memoryview) -> int:
        """Bytes of a body: all of `target`, unless they end before or keep it waiting."""
        if not self._plain:
            return self._socket.recv_into(target)
        with _Blocking(self._socket, self._timeout_s):
            return self._socket.recv_into(target, 0, socket.MSG_WAITALL)

    def has_more(self, buffer: io.BufferedReader) -> bool:
        """Whether something lies in `buffer`, which reads from here, or can be read at once."""
        self._socket.settimeout(0)
        try:
            return bool(buffer.peek())
        except ssl.SSLWantReadError:
            return False
        except OSError:  # the answer is whole all the same; only the connection is not
            return True
        finally:
            self._socket.settimeout(self._timeout_s)

    def rest(self) -> None:
        """Let it be used again; nothing is under way."""
        self._rests_since_s = time.monotonic()
        self._keep(self)

    def close(self) -> None:
        """End it, whatever is under way."""
        self._client.close()

    def _exchange(self, message: Message) -> Answer:
        client = self._client
        client.putrequest(message.method, message.target, skip_accept_encoding=True)
        for name, value in message.headers:
            client.putheader(name, value)
        client.endheaders()
        try:
            self._send(message.views)
        except CLOSED as error:
            return self._refusal(error)
        except TimeoutError as error:
            if not self._heard():
                raise
            return self._refusal(error)
        return Answer(self, response_of(client), keeps=True)

    def _heard(self) -> bool:
        """Whether there is something to read, or an end."""
        # What TLS has decrypted no longer lies in the socket.
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _send(self, views: Sequence[memoryview]) -> None:
        if not self._plain:
            for view in views:
                self._socket.sendall(view)
        elif views:
            with _Blocking(self._socket, self._timeout_s):
                for view in views:
                    self._socket.sendall(view)

    def _refusal(self, error: Exception) -> Answer:
        """What a store said that would not take all of a body; `error` if it said nothing."""
        try:
            response = response_of(self._client)
        except OSError:
            raise error from None
        if response.status < _REDIRECT:  # of a body that it has not got it can have stored nothing
            response.close()
            raise error
        return Answer(self, response, keeps=False)


class _Blocking:
    """A socket blocks for as long as the kernel's limit lets it, and each call is one piece."""

    def __init__(self, blocking: socket.socket, timeout_s: float) -> None:
        self._socket = blocking
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._socket.settimeout(None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._socket.settimeout(self._timeout_s)
        if kind is not None and issubclass(kind, BlockingIOError):
            msg = f"nothing moved for {self._timeout_s:g} s"
            raise TimeoutError(msg)
