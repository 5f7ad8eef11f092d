"""Questions of tests on zstd frames, answered by the library, not the codec."""

import zstandard


def first_frame_bytes(data):
    """Return the length of the frame that `data` begins with."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    decoder.decompress(data)
    assert decoder.eof
    return len(data) - len(decoder.unused_data)
