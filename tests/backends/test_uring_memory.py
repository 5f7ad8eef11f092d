"""Memory moved by io_uring is released."""

import mmap

import pytest

from penstock.backends.uring.engine import UringBackend, UringConfig
from penstock.core.types import ReadRequest, WriteRequest

SIZE = 4 << 20


@pytest.mark.uring
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_buffers_are_returned_after_a_call(tmp_path, direct_io):
    backend = UringBackend(UringConfig(path=str(tmp_path), direct_io=direct_io))
    source, target = mmap.mmap(-1, SIZE), mmap.mmap(-1, SIZE)
    source[:] = bytes(range(256)) * (SIZE // 256)
    writer = backend.create("blob")
    with memoryview(source) as view:
        writer.write([WriteRequest(0, (view,))])
    writer.seal(SIZE)
    with memoryview(target) as view:
        backend.read([ReadRequest("blob", 0, view)])
    assert target[:] == source[:]
    backend.close()
    source.close()  # BufferError while a reference exists
    target.close()
