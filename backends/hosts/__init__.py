"""The backend `hosts`, with a root on each host of a job."""

from penstock.backends.hosts.backend import HostsBackend, HostsConfig

__all__ = ["HostsBackend", "HostsConfig"]
