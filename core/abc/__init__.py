"""The three contracts: `StateProvider`, `Codec`, `Backend`, and the records that cross them.

Each contract carries an API version; the registry refuses a class of another one. Everything
after the second argument is keyword-only. Conformance suites ship in `penstock.core.testing`.
"""

from penstock.core.abc.backend import Backend, BlobWriter, check_blob_name
from penstock.core.abc.codec import Codec, CodecContext
from penstock.core.abc.memory import ByteSink, ByteSource, MemoryKey, PendingCopy
from penstock.core.abc.plugin import API_VERSION, PluginConfig
from penstock.core.abc.provider import (
    DescribeContext,
    Node,
    PlaceContext,
    Placement,
    StateObject,
    StateProvider,
    StoredObject,
    Target,
)

__all__ = [
    "API_VERSION",
    "Backend",
    "BlobWriter",
    "ByteSink",
    "ByteSource",
    "Codec",
    "CodecContext",
    "DescribeContext",
    "MemoryKey",
    "Node",
    "PendingCopy",
    "PlaceContext",
    "Placement",
    "PluginConfig",
    "StateObject",
    "StateProvider",
    "StoredObject",
    "Target",
    "check_blob_name",
]
