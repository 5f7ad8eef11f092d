"""Objects for plan tests: described ones whose bytes have only a length and an address."""

from penstock.core.abc import ByteSource, StateObject
from penstock.core.plan.save import Capture, PlannedObject, RawLayout
from penstock.core.types import PAGE_BYTES, Kind, Region, Role, TensorSpec


class NoBytes(ByteSource):
    """This many bytes at an address; reading them is an error."""

    __slots__ = ("address", "device", "memory", "nbytes")

    def __init__(self, nbytes, *, phase=64, device="cpu"):
        self.nbytes = nbytes
        self.device = device
        self.address = PAGE_BYTES + phase
        self.memory = None

    def view(self):
        raise AssertionError

    def copy_out(self, start, out, /):
        raise AssertionError


def planned(
    source,
    *,
    itemsize=1,
    path=("g",),
    role=Role.OTHER,
    chain=0,
    capture=Capture.NOW,
    dtype="uint8",
):
    """The object whose bytes `source` has; its version is taken now."""
    spec = TensorSpec(dtype, itemsize, (source.nbytes // itemsize,))
    region = Region.whole(spec.shape)
    entry = StateObject(path, Kind.TENSOR, spec, (region,), role, "tensor", source)
    return PlannedObject(entry, capture, chain, source.version())


def raw_places(plan):
    """The offset of each chunk if all raw ones are written (None: encoded), and the blob's end."""
    layout = RawLayout()
    return [None if c.chain else layout.place(c) for c in plan.chunks], layout.end
