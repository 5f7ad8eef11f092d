"""Replies read straight into the memory that waits for them.

redis-py hands replies out as new bytes that it has put together in a buffer of its own: some four
copies. Here it makes the connection, logs in and sends; all answers are bulk strings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import redis

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEADER_BYTES = 1 << 16  # read ahead for headers; larger rests go past it


def get_ranges(client: redis.Redis, wanted: Sequence[tuple[str, int, memoryview]]) -> list[int]:
    """`GETRANGE` for each (key, start, target), all sent at once.

    Returns:
        How many bytes there were for each target; the rest of it is as it was.

    Raises:
        redis.RedisError: As redis-py raises them; the connection is closed then.
    """
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        commands = [
            ("GETRANGE", key, start, start + target.nbytes - 1) for key, start, target in wanted
        ]
        connection.send_packed_command(connection.pack_commands(commands))
        # The one thing here that redis-py does not promise; its name has been the same since 2.0.
        with connection._sock.makefile("rb", buffering=_HEADER_BYTES) as stream:
            return [_bulk(stream, target) for _, _, target in wanted]
    except TimeoutError as error:
        connection.disconnect()
        raise redis.TimeoutError("timeout while reading") from error
    except OSError as error:
        connection.disconnect()
        raise redis.ConnectionError(f"while reading: {error}") from error
    except BaseException:
        connection.disconnect()  # bytes still in flight must not meet the next request
        raise
    finally:
        pool.release(connection)


def _bulk(stream: BinaryIO, target: memoryview) -> int:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise redis.ConnectionError("the server closed the connection")
    if line.startswith(b"-"):
        text = line[1:-2].decode(errors="replace")
        known = redis.exceptions.BusyLoadingError if text.startswith("LOADING") else None
        raise (known or redis.ResponseError)(text)
    size = int(line[1:-2]) if line.startswith(b"$") else -1
    if not 0 <= size <= target.nbytes:
        raise redis.InvalidResponse(f"expected at most {target.nbytes} bytes, not {line[:40]!r}")
    done = 0
    while done < size:
        count = stream.readinto(target[done:size])  # type: ignore[attr-defined]
        if not count:
            raise redis.ConnectionError("the server closed the connection")
        done += count
    stream.read(2)
    return size
