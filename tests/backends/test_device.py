"""The disk of a folder, as a `/sys` made here reports it."""

import os

import pytest

from penstock.backends.local.base import is_virtio

VIRTIO = "devices/pci0000:00/0000:00:02.0/virtio1/block/vda"
NVME = "devices/pci0000:00/0000:00:1d.0/nvme/nvme0/nvme0n1"
VOLUME = "devices/virtual/block/dm-0"


@pytest.fixture
def sys_of(tmp_path):
    """Make a `/sys` in which the disk of `tmp_path` is the one with this path."""

    def make(device):
        numbers = tmp_path.stat().st_dev
        devices = tmp_path / "sys" / "dev" / "block"
        devices.mkdir(parents=True)
        (tmp_path / "sys" / device).mkdir(parents=True)
        (devices / f"{os.major(numbers)}:{os.minor(numbers)}").symlink_to(f"../../{device}")
        return str(devices)

    return make


@pytest.mark.parametrize(
    ("device", "virtio"), [(VIRTIO, True), (f"{VIRTIO}/vda1", True), (NVME, False), (VOLUME, False)]
)
def test_a_hypervisor_disk_is_known_by_its_driver(device, virtio, sys_of, tmp_path):
    assert is_virtio(str(tmp_path), sys_of(device)) is virtio
    assert is_virtio(str(tmp_path / "not" / "yet"), str(tmp_path / "sys/dev/block")) is virtio


@pytest.mark.parametrize("below", [VIRTIO, NVME])
def test_a_volume_counts_as_its_disks(below, sys_of, tmp_path):
    devices = sys_of(VOLUME)
    (tmp_path / "sys" / below).mkdir(parents=True)
    slaves = tmp_path / "sys" / VOLUME / "slaves"
    slaves.mkdir()
    (slaves / "disk").symlink_to(tmp_path / "sys" / below)
    (slaves / "itself").symlink_to(tmp_path / "sys" / VOLUME)
    assert is_virtio(str(tmp_path), devices) is (below == VIRTIO)
