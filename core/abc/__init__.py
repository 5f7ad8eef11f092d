"""The three contracts: `StateProvider`, `Codec`, `Backend`, and the records that cross them.

Each contract carries an API version; the registry refuses a class of another one. Everything
after the second argument is keyword-only. Conformance suites ship in `penstock.core.testing`.
"""

from penstock.core.abc.backend import Backend, BlobWriter, Tier, check_blob_name
from penstock.core.abc.codec import Codec, CodecContext
from penstock.core.abc.memory import ByteSink, ByteSource, MemoryKey, PendingCopy
from penstock.core.abc.plugin import (
    API_VERSION,
    PluginConfig,
    SizeBytes,
    parse_size,
    says_its_version,
)
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
    "SizeBytes",
    "StateObject",
    "StateProvider",
    "StoredObject",
    "Target",
    "Tier",
    "check_blob_name",
    "parse_size",
    "says_its_version",
]
