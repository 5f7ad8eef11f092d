"""The botocore client, and the transport of its requests.

botocore finds credentials, signs, speaks HTTP and parses the answers. Its requests go through
`Transport`, which adds the rules that its HTTP session lacks.
"""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock.backends.fsspec.s3.answers import BrokenAnswerError
from penstock.core.distributions import installed_only
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.fsspec.config import FsspecConfig, S3Options

_OK, _REDIRECT, _REFUSED = 200, 300, 400  # the first status of success, redirects and refusals
_SEND_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_TEXT_BYTES = 16 << 20  # a page of a listing has at most 1,000 names of 1,024 bytes, escaped
_SHOWN_CHARS = 100  # the most characters of a server's header that a message shows
_IDLE_S = 30.0


@installed_only()
def connect(config: FsspecConfig, options: S3Options) -> tuple[Any, Transport]:
    """Return a botocore client and the transport of its requests, without connecting.

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
    s3: dict[str, Any] = {"payload_signing_enabled": False}  # SHA-256 would take 0.6 s per GiB
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
            # Checksums of the manifest cover every stored byte, and each part is sent with a CRC.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            signature_version=UNSIGNED if options.anon else None,
            s3=s3,
        ),
    )
    verify: bool | str = options.verify
    if verify is True:
        # botocore applies these variables to its own session only, which `Transport` replaces.
        named = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        verify = named or True
    transport = Transport(config, endpoint_url=client.meta.endpoint_url, verify=verify)
    client.meta.events.register("before-send.s3", transport.send)
    return client, transport


class Transport:
    """Sends requests through botocore's HTTP session, with additional rules. Thread-safe.

    * Raises an error for an unstreamed answer that is incomplete or too long. Without the limit, a
      store could exhaust the memory of this process.
    * Sends bodies without `Expect: 100-continue`, which would cost one more round trip.
    * Does not reuse a connection that was idle for long: firewalls forget such connections, and
      drop their packets silently.

    Args:
        config: Has the number of requests in flight, and the timeout.
        endpoint_url: The URL of the store; the environment may name a proxy for it.
        verify: Whether to check TLS certificates, or a file with the certificates to trust.
        clock: Returns a time in seconds, to measure the pause between two requests.
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
            # For connecting and for reading. The first also limits the time to send one piece of a
            # body.
            timeout=(config.timeout_s, config.timeout_s),
            max_pool_connections=config.parallel + 4,
            # Otherwise a body waits for up to 40 ms until the store acknowledges its head.
            socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
        )
        self._clock = clock
        self._used_s = clock()
        self._lock = threading.Lock()  # guards `_used_s`

    def send(self, request: Any, event_name: str = "", **_: Any) -> Any:
        """Return the answer to a signed request; botocore calls this as its `before-send` handler.

        Raises:
            BrokenAnswerError: The answer is cut off, too long, or not about this request.
        """
        self._close_idle()
        request.headers.pop("Expect", None)
        streamed = request.stream_output
        request.stream_output = True  # or the session reads the whole answer
        answer = self._session.send(request)
        answer.raw.enforce_content_length = True
        try:
            _check_head(request, answer)
            if event_name.endswith(".HeadBucket"):
                _check_region(answer)
            if not streamed or answer.status_code >= _REDIRECT:
                answer.raw = _text(answer.raw)
        except BaseException:
            answer.raw.close()
            raise
        return answer

    def close(self) -> None:
        """Close idle connections. Every other connection closes after its answer is read."""
        self._session.close()

    def _close_idle(self) -> None:
        with self._lock:
            now = self._clock()
            idle = now - self._used_s > _IDLE_S
            self._used_s = now
        if idle:
            self._session.close()


class Views(io.RawIOBase):
    """A file object over memory, which botocore sends as a body without copying it.

    `read` ignores the requested size. Its pieces are large, but small enough that a slow network
    accepts each of them within the timeout.
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
    """Refuse invalid answer headers that http.client accepts."""
    if answer.status_code < _OK:  # the final answer is still to come
        msg = f"a provisional answer ({answer.status_code}), which was not requested"
        raise BrokenAnswerError(msg)
    for name, usable in (("Content-Length", str.isdecimal), ("Transfer-Encoding", _is_chunked)):
        value = str(answer.headers.get(name, "")).strip()
        if value and not usable(value):
            msg = f"the head of the answer cannot be used ({name}: {value[:_SHOWN_CHARS]})"
            raise BrokenAnswerError(msg)
    body = request.body
    if isinstance(body, Views) and body.tell() < len(body) and answer.status_code < _REDIRECT:
        msg = "the answer reports success before the body was sent to its end"
        raise BrokenAnswerError(msg)


def _check_region(answer: Any) -> None:
    """Refuse a redirect without a region.

    botocore would ask for the region with the redirected operation, and recurse without end.
    """
    redirects = _REDIRECT <= answer.status_code < _REFUSED
    if redirects and "x-amz-bucket-region" not in answer.headers:
        msg = f"the store redirects ({answer.status_code}), but names no region; is this its URL?"
        raise BrokenAnswerError(msg)


def _is_chunked(coding: str) -> bool:
    return coding.lower() == "chunked"


def _text(raw: Any) -> Any:
    """Read a whole answer, and return it in the form that botocore expects; refuse long answers."""
    from urllib3 import HTTPResponse  # noqa: PLC0415 - comes with botocore

    text = io.BytesIO()
    while piece := raw.read(_READ_BYTES):
        text.write(piece)
        if text.tell() > _TEXT_BYTES:
            msg = f"the text of the answer has more than {_TEXT_BYTES:,} bytes"
            raise BrokenAnswerError(msg)
    text.seek(0)
    return HTTPResponse(text, preload_content=False)
