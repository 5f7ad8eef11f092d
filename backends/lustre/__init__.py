"""`lustre`: files on Lustre, each laid out over the OSTs before its first byte is written."""

from penstock.backends.lustre.backend import LustreBackend
from penstock.backends.lustre.config import LustreConfig

__all__ = ["LustreBackend", "LustreConfig"]
