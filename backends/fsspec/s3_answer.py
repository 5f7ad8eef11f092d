"""The answer to one request: its head, which must be whole and plain, and its body."""

from __future__ import annotations

import http.client
import io
from email.errors import (
    FirstHeaderLineIsContinuationDefect,
    MisplacedEnvelopeHeaderDefect,
    MissingHeaderBodySeparatorDefect,
)
from typing import TYPE_CHECKING, Any, Protocol

from penstock.backends.fsspec.s3_errors import BrokenAnswerError

if TYPE_CHECKING:
    from collections.abc import Iterator

_OK = 200
_SHOWN_CHARS = 100  # of what a server sent instead of a head
_DEFECTS = (
    FirstHeaderLineIsContinuationDefect,
    MisplacedEnvelopeHeaderDefect,
    MissingHeaderBodySeparatorDefect,
)


class Carrier(Protocol):
    """What an answer needs of the connection on which it comes."""

    def receive(self, target: memoryview, /) -> int:
        """Bytes into `target`; 0: there are no more."""
        ...

    def has_more(self, buffer: io.BufferedReader, /) -> bool:
        """Whether something lies in `buffer`, or can be read at once."""
        ...

    def rest(self) -> None:
        """Nothing is under way any more."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Response(http.client.HTTPResponse):
    """http.client takes an end for that of the head, and gives what came until then."""

    def __init__(self, sock: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = _Lines(self.fp.detach())


class _Lines(io.BufferedReader):
    _begun = False

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if not self._begun:
            self._begun = True
            if not line:  # http.client has an error of its own for an end without an answer
                return line
            if not line.startswith((b"HTTP/1.0 ", b"HTTP/1.1 ")):
                msg = f"the answer is not of HTTP/1.1: {line[:_SHOWN_CHARS]!r}"
                raise BrokenAnswerError(msg)
        if not line.endswith(b"\n") and len(line) != size:
            msg = "the answer ended early, before its body"
            raise BrokenAnswerError(msg)
        return line


def response_of(client: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """The answer to what `client` has sent, once its head is there.

    Raises:
        BrokenAnswerError: The head is cut off, or leaves open where the body ends.
        ConnectionResetError: There is no answer.
    """
    try:
        response = client.getresponse()
    except ConnectionError:
        raise
    except http.client.HTTPException as error:
        told = str(error)[:_SHOWN_CHARS]
        msg = f"the head of the answer cannot be read: {type(error).__name__}: {told!r}"
        raise BrokenAnswerError(msg) from error
    problem = _problem(response)
    if problem:
        response.close()
        msg = f"the head of the answer cannot be used: {problem}"
        raise BrokenAnswerError(msg)
    return response


def _problem(response: http.client.HTTPResponse) -> str:
    if response.status < _OK:  # the answer itself is still to come
        return f"a provisional answer ({response.status}), which nobody asked for"
    if any(isinstance(defect, _DEFECTS) for defect in response.headers.defects):
        return "a line of it is no header"
    codings = [coding.lower() for coding in response.headers.get_all("Transfer-Encoding", [])]
    if codings not in ([], ["chunked"]):
        return f"Transfer-Encoding: {', '.join(codings)[:_SHOWN_CHARS]}"
    lengths = {told.strip() for told in response.headers.get_all("Content-Length", [])}
    if len(lengths) > 1 or not all(told.isascii() and told.isdigit() for told in lengths):
        return f"Content-Length: {', '.join(sorted(lengths))[:_SHOWN_CHARS]}"
    return ""


class Answer:
    """An answer, whose body is still to be read; then the connection is kept.

    Args:
        carrier: On which it comes.
        response: Its head.
        keeps: Whether the connection is good for another request.
    """

    def __init__(
        self, carrier: Carrier, response: http.client.HTTPResponse, *, keeps: bool
    ) -> None:
        self.status = response.status
        self.headers = dict(response.getheaders())
        self._carrier = carrier
        self._response = response
        self._left = response.length  # None: only its end will tell
        # Where http.client finds the end it also reads on and drops what came behind.
        self._keeps = keeps and not response.will_close and self._left is not None
        self._buffered = True  # what came along with the head is read first
        self._over = False

    def readinto(self, target: memoryview) -> int:
        """Bytes of the body, into `target`; 0: it is over.

        Raises:
            BrokenAnswerError: The body ended early.
        """
        try:
            if self._left is None:
                return self._read_to_end_mark(target)
            return self._read_measured(target, self._left)
        except BaseException:
            self.close()
            raise

    def stream(self) -> Iterator[bytes]:
        """All of the body, as botocore asks for what is no blob: an answer's text."""
        pieces = []
        room = memoryview(bytearray(8192))
        while not self._over and (count := self.readinto(room)):
            pieces.append(bytes(room[:count]))
        yield b"".join(pieces)

    def close(self) -> None:
        """Read no more."""
        if not self._over:
            self._over = True
            self._response.close()
            self._carrier.close()

    def _read_measured(self, target: memoryview, left: int) -> int:
        view = target[:left]
        count = 0
        if view.nbytes:
            if self._buffered:
                count = self._response.fp.readinto1(view)
                self._buffered = count == view.nbytes
            else:
                count = self._carrier.receive(view)
            if not count:
                msg = f"the answer ended {left} bytes early"
                raise BrokenAnswerError(msg)
            self._left = left - count
        if not self._left:
            self._end()
        return count

    def _read_to_end_mark(self, target: memoryview) -> int:
        try:
            count = self._response.readinto(target)
        except http.client.HTTPException as error:
            msg = f"the answer ended early: {error}"
            raise BrokenAnswerError(msg) from error
        if self._response.isclosed():
            self._end()
        return count

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        # Nobody asked for what came along; the next answer would be taken for it, or torn by it.
        more = self._keeps and self._buffered and self._carrier.has_more(self._response.fp)
        self._response.close()
        if self._keeps and not more:
            self._carrier.rest()
        else:
            self._carrier.close()
