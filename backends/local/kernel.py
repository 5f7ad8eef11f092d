"""System calls and memory functions that Python lacks; all but `address` release the GIL."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from functools import cache
from typing import Any

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_AT = 0x98  # u32 dio_mem_align, u32 dio_offset_align
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address(view: memoryview) -> int:
    """Return the address of the first byte of `view`, which may be read-only."""
    # By the C API: `ctypes.from_buffer` refuses read-only views.
    raw = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(raw), 0)
    try:
        return raw.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))


def move(target: int, source: int, length: int) -> None:
    """Copy memory without the GIL; slice assignment of memoryviews holds it."""
    ctypes.memmove(target, source, length)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_libc(), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"{name} is not in the C library")
    while function(*arguments) != 0:
        number = ctypes.get_errno()
        # Python retries its own system calls after a signal (PEP 475), but not those of ctypes.
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def fallocate(fd: int, offset: int, length: int) -> None:
    """Reserve blocks and extend the file; unlike `posix_fallocate` it never writes zeros.

    Raises:
        OSError: The blocks cannot be reserved: `EOPNOTSUPP` or `ENOSYS` if that is unsupported.
    """
    _call("fallocate", fd, 0, ctypes.c_long(offset), ctypes.c_long(length))


def direct_alignment(fd: int) -> int | None:
    """Return the alignment in bytes that direct I/O on `fd` needs for memory and offsets.

    Returns:
        The alignment; 0 if the file system refuses direct I/O, None if it does not report one.
    """
    out = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        _call("statx", fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, out)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=I", out)
    if not mask & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", out, _STATX_DIO_AT)
    return max(memory, offset) if memory and offset else 0


def file_system_type(fd: int) -> int:
    """Return the file system's magic number (`f_type` of statfs(2)).

    Raises:
        OSError: The file system does not report it.
    """
    out = ctypes.create_string_buffer(_STATX_BYTES)
    _call("fstatfs", fd, out)
    (number,) = struct.unpack_from("@l", out)
    return int(number) & 0xFFFFFFFF  # some are negative where `long` has 32 bits


def memory_file_system(fd: int) -> str | None:
    """Return the name of the file system of `fd` if it keeps files in memory, else None.

    Such a file system may accept O_DIRECT, although its files stay in memory.
    """
    try:
        return _MEMORY_FILE_SYSTEMS.get(file_system_type(fd))
    except OSError:
        return None
