"""The backend `lustre`: files on Lustre, each striped over OSTs before its first byte.

The package contains layouts, the policy that chooses them, and the calls to `lfs`. The code that
all file backends share is in `penstock.backends.local`.
"""

from penstock.backends.lustre.backend import LustreBackend
from penstock.backends.lustre.config import LustreConfig

__all__ = ["LustreBackend", "LustreConfig"]
