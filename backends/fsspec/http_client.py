"""The client of aiohttp for fsspec's HTTP: bounds each answer, and keeps headers to one origin.

fsspec itself reads each answer whole, however long it is, and follows a redirect to any host with
the headers of the user's options.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from penstock.backends.fsspec.errors import RefusedAnswerError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_PAGE_BYTES = 64 << 20  # of links to other files
_REFUSAL_BYTES = 1 << 20
_ERROR = 400
_RANGE = re.compile(r"bytes=(\d+)-(\d+)", re.ASCII)


async def bounded_client(**options: Any) -> ClientSession:
    """Return a session that refuses answers longer than the range that was asked for.

    With headers of the user it also refuses redirects to another origin: aiohttp would send all
    headers there but a few that it knows to be credentials.
    """
    import aiohttp  # noqa: PLC0415 - an extra

    guarded = bool(options.pop("guard_headers", False) or options.get("headers"))
    tracing = aiohttp.TraceConfig()
    if guarded:
        tracing.on_request_redirect.append(_check_redirect)
    options["trace_configs"] = [*(options.get("trace_configs") or ()), tracing]
    return aiohttp.ClientSession(**{"response_class": _bounded_response(), **options})


@cache
def _bounded_response() -> type[ClientResponse]:
    import aiohttp  # noqa: PLC0415 - an extra

    class BoundedResponse(aiohttp.ClientResponse):
        async def read(self) -> bytes:  # fsspec calls it for every body
            if self._body is None:
                try:
                    self._body = await self._read_bounded(_limit_bytes(self))
                except BaseException:
                    self.close()
                    raise
            return self._body

        async def _read_bounded(self, limit: int) -> bytes:
            pieces: list[bytes] = []
            size = 0
            while piece := await self.content.readany():
                size += len(piece)
                if size > limit:
                    msg = (
                        f"{self.url.host} sends more than the {limit:,} bytes that were asked for: "
                        "it does not serve ranges of bytes, or is no store; copy the run, or use "
                        "another"
                    )
                    raise RefusedAnswerError(msg)
                pieces.append(piece)
            return b"".join(pieces)

    return BoundedResponse


def _limit_bytes(answer: ClientResponse) -> int:
    """Return how long the body of an answer may be, by its status and the requested range."""
    if answer.status >= _ERROR:
        return _REFUSAL_BYTES
    asked = _RANGE.fullmatch(answer.request_info.headers.get("Range", ""))
    if asked is None:
        return _PAGE_BYTES
    return int(asked[2]) - int(asked[1]) + 1


async def _check_redirect(_session: object, _context: object, params: Any) -> None:
    target = params.url.join(type(params.url)(params.response.headers.get("Location", "")))
    if target.origin() != params.url.origin():
        params.response.close()
        msg = (
            f"{params.url.host} leads to {target.host}, which would get the headers of `options`, "
            "and the secrets in them; give the URL to which it leads"
        )
        raise RefusedAnswerError(msg)
