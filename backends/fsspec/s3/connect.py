"""A client of botocore as this backend wants it, and how its requests travel.

botocore finds credentials, signs, speaks HTTP and understands the answers. Its requests go through
`Transport`, which adds the rules that its HTTP session lacks.
"""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock.backends.fsspec.s3.errors import BrokenAnswerError
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.fsspec.config import FsspecConfig, S3Options

_OK, _REDIRECT = 200, 300  # the first status of success, and of all that is none
_SEND_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_TEXT_BYTES = 16 << 20  # a page of a listing has at most 1,000 names of 1,024 bytes, escaped
_SHOWN_CHARS = 100  # of what a server sent
_IDLE_S = 30.0


def connect(config: FsspecConfig, options: S3Options) -> tuple[Any, Transport]:
    """Return a client of botocore, and what carries its requests; it connects to nothing yet.

    Raises:
        ConfigError: botocore is missing.
    """
    try:
        import botocore.session  # noqa: PLC0415 - 140 ms, and an extra
        from botocore import UNSIGNED  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415
    except ImportError as error:
        msg = f"{config.shown_url}: S3 needs botocore: pip install 'penstock[s3]'"
        raise ConfigError(msg) from error
    s3: dict[str, Any] = {"payload_signing_enabled": False}  # 0.6 s of SHA-256 per GiB
    if options.addressing_style != "auto":
        s3["addressing_style"] = options.addressing_style
    session = botocore.session.Session(profile=options.profile)
    client = session.create_client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        aws_access_key_id=options.key,
        aws_secret_access_key=options.secret,
        aws_session_token=options.token,
        config=Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Checksums of ours bind every stored byte; a CRC of each part is sent besides.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            signature_version=UNSIGNED if options.anon else None,
            s3=s3,
        ),
    )
    verify: bool | str = options.verify
    if verify is True:  # the environment may name a file
        named = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        verify = named or True
    transport = Transport(config, endpoint_url=client.meta.endpoint_url, verify=verify)
    client.meta.events.register("before-send.s3", transport.send)
    return client, transport


class Transport:
    """The HTTP session of botocore, with rules that it lacks. Thread-safe.

    An answer that is not streamed has a limit, since a store could else make this process hold
    whatever it sends; it is whole, or an error. Bodies are sent without asking whether they are
    welcome, which costs one more way to the store and back. A connection that rested is not used
    again: firewalls forget those, and drop what comes later without an answer.

    Args:
        config: How many requests run at once, and how long the store may take to go on.
        endpoint_url: Of the store; the environment may name a proxy for it.
        verify: Whether TLS certificates are checked; or the file with those to trust.
        clock: Seconds since some moment, of which the time between two requests is taken.
    """

    def __init__(
        self,
        config: FsspecConfig,
        *,
        endpoint_url: str,
        verify: bool | str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from botocore.httpsession import URLLib3Session  # noqa: PLC0415 - an extra
        from botocore.utils import get_environ_proxies  # noqa: PLC0415

        self._session = URLLib3Session(
            verify=verify,  # pyright: ignore[reportArgumentType] - botocore takes names of files, too
            proxies=get_environ_proxies(endpoint_url),
            # The first of the two also limits how long a store may take a piece of a body.
            timeout=(config.timeout_s, config.timeout_s),
            max_pool_connections=config.parallel + 4,
            # Else a body waits for up to 40 ms until the store has acknowledged its head.
            socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
        )
        self._clock = clock
        self._used_s = clock()
        self._lock = threading.Lock()  # guards the time of the last use

    def send(self, request: Any, **_: Any) -> Any:
        """Return the answer to a signed request: a handler of botocore's `before-send`.

        Raises:
            BrokenAnswerError: The answer is none to this request, is cut off, or has no end.
        """
        self._close_rested()
        request.headers.pop("Expect", None)
        streamed = request.stream_output
        request.stream_output = True  # else the session itself reads all of the answer
        answer = self._session.send(request)
        answer.raw.enforce_content_length = True
        try:
            _check_head(request, answer)
            if not streamed or answer.status_code >= _REDIRECT:
                answer.raw = _text(answer.raw)
        except BaseException:
            answer.raw.close()
            raise
        return answer

    def close(self) -> None:
        """Close the connections that rest; the others are closed once their answer is read."""
        self._session.close()

    def _close_rested(self) -> None:
        with self._lock:
            now = self._clock()
            rested = now - self._used_s > _IDLE_S
            self._used_s = now
        if rested:
            self._session.close()


class Views(io.RawIOBase):
    """Memory as the file that botocore takes for a body, without copying it.

    `read` returns pieces of one size, whatever was asked for: large enough to be few, and small
    enough that a slow network takes each within the time limit.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        super().__init__()
        self.views = views
        self._size = sum(view.nbytes for view in views)
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, _: int | None = -1, /) -> Any:
        skip = self._at
        for view in self.views:
            if skip < view.nbytes:
                piece = view[skip : skip + _SEND_BYTES]
                self._at += piece.nbytes
                return piece
            skip -= view.nbytes
        return memoryview(b"")

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at


def _check_head(request: Any, answer: Any) -> None:
    """Refuse heads that http.client lets pass, although what follows cannot be understood."""
    if answer.status_code < _OK:  # the answer itself is still to come
        msg = f"a provisional answer ({answer.status_code}), which nobody asked for"
        raise BrokenAnswerError(msg)
    for name, usable in (("Content-Length", str.isdecimal), ("Transfer-Encoding", _is_chunked)):
        value = str(answer.headers.get(name, "")).strip()
        if value and not usable(value):
            msg = f"the head of the answer cannot be used ({name}: {value[:_SHOWN_CHARS]})"
            raise BrokenAnswerError(msg)
    body = request.body
    if isinstance(body, Views) and body.tell() < len(body) and answer.status_code < _REDIRECT:
        msg = "the answer says that a body is stored which was not sent to its end"
        raise BrokenAnswerError(msg)


def _is_chunked(coding: str) -> bool:
    return coding.lower() == "chunked"


def _text(raw: Any) -> Any:
    """Read all of an answer, up to the limit; as what botocore reads it from."""
    from urllib3 import HTTPResponse  # noqa: PLC0415 - comes with botocore

    text = io.BytesIO()
    while piece := raw.read(_READ_BYTES):
        text.write(piece)
        if text.tell() > _TEXT_BYTES:
            msg = f"the answer's text goes on behind {_TEXT_BYTES:,} bytes"
            raise BrokenAnswerError(msg)
    text.seek(0)
    return HTTPResponse(text, preload_content=False)
