"""The contracts of `StateProvider`, `Codec`, `Backend` and `Replayer`, and their records.

Covers the guarantees between plugins and core, with slow but correct defaults. `Coordination` is
the contract through which ranks agree. It is no plugin: core creates the implementation, and no
registry finds it. Code that calls a plugin is elsewhere. Each plugin contract has an API version;
the registry refuses a class with another version. Conformance suites ship in `penstock.testing`.
Everything may import this package.
"""

from penstock.core.abc.backend import Backend, BlobWriter, check_blob_name
from penstock.core.abc.byte_sources import (
    ByteSink,
    ByteSource,
    Lines,
    MemoryKey,
    PendingCopy,
    places_of,
    versions_of,
)
from penstock.core.abc.codec import DECLINED, Codec, CodecContext, CodecOutput, Declined
from penstock.core.abc.delegating import DelegatingBackend, DelegatingWriter
from penstock.core.abc.hosts import (
    HOST_NAME,
    OTHER_HOST,
    HostRecord,
    HostRoot,
    HostRoots,
    absence,
    absent_hosts,
    copies_of,
    encode_host,
    host_roots,
    is_reduced,
    place_text,
    read_host,
)
from penstock.core.abc.job_store import (
    COORDINATION_VALUE_BYTES,
    Coordination,
    check_coordination_key,
    check_coordination_value,
)
from penstock.core.abc.plugin import (
    API_VERSION,
    PluginConfig,
    SizeBytes,
    parse_size,
    says_its_version,
    without_credentials,
)
from penstock.core.abc.provider import (
    DescribeContext,
    Difference,
    Node,
    PlaceContext,
    Placement,
    StateObject,
    StateProvider,
    StoredObject,
    Target,
    ranks_node,
    ranks_of,
)
from penstock.core.abc.replayer import Replayer, Unit
from penstock.core.abc.tiers import (
    ROOT_NAME,
    RootRecord,
    Tier,
    encode_root,
    first_durable,
    first_whole,
    misplaced_roots,
    read_root,
)
from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.concurrency.timing import Timing, current_timing
from penstock.core.concurrency.watchdog import Deadline, call_all_with_deadline
from penstock.core.floats.conversion import FLOAT_DTYPES, convert_floats

__all__ = [
    "API_VERSION",
    "COORDINATION_VALUE_BYTES",
    "DECLINED",
    "FLOAT_DTYPES",
    "HOST_NAME",
    "OTHER_HOST",
    "ROOT_NAME",
    "Backend",
    "BlobWriter",
    "ByteSink",
    "ByteSource",
    "Codec",
    "CodecContext",
    "CodecOutput",
    "Coordination",
    "Deadline",
    "Declined",
    "DelegatingBackend",
    "DelegatingWriter",
    "DescribeContext",
    "Difference",
    "HostRecord",
    "HostRoot",
    "HostRoots",
    "Lines",
    "MemoryKey",
    "Node",
    "PendingCopy",
    "PlaceContext",
    "Placement",
    "PluginConfig",
    "Replayer",
    "RootRecord",
    "SizeBytes",
    "StateObject",
    "StateProvider",
    "StoredObject",
    "Target",
    "Tier",
    "Timing",
    "Unit",
    "absence",
    "absent_hosts",
    "call_all_with_deadline",
    "check_blob_name",
    "check_coordination_key",
    "check_coordination_value",
    "convert_floats",
    "copies_of",
    "copy_bytes",
    "current_timing",
    "encode_host",
    "encode_root",
    "first_durable",
    "first_whole",
    "host_roots",
    "is_reduced",
    "misplaced_roots",
    "parse_size",
    "place_text",
    "places_of",
    "ranks_node",
    "ranks_of",
    "read_host",
    "read_root",
    "says_its_version",
    "versions_of",
    "without_credentials",
]
