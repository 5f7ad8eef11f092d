"""A wire between ranks of several hosts: a harmful proxy at the address of each rank."""

import json
import socket
import threading
from contextlib import suppress

from penstock.testing.coordination import MemoryCoordination


class Wire:
    """Carries the connections of ranks; `harm` may change the bytes that reading ranks send.

    Args:
        harm: Called with the sending rank, and bytes that it sends; returns the bytes that arrive.
            None cuts the connection silently: nothing more arrives.
    """

    def __init__(self, harm=lambda _rank, data: data):
        self.harm = harm
        self.addresses = {}
        self._lock = threading.Lock()
        self._sockets = []

    def coordination(self, board):
        """One rank's view of a board that gives addresses of this wire instead of the ranks'."""
        return _Rewiring(board, self)

    def address_for(self, rank, address):
        """The address at which this wire poses as a rank."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._keep(listener)
        self.addresses[rank] = address
        threading.Thread(target=self._accept, args=(listener, rank, address), daemon=True).start()
        return listener.getsockname()[:2]

    def close(self):
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _keep(self, one):
        with self._lock:
            self._sockets.append(one)

    def _accept(self, listener, rank, address):
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                self._keep(near)
                far = socket.create_connection(address)
                self._keep(far)
                for source, target, of in ((near, far, None), (far, near, rank)):
                    threading.Thread(
                        target=self._carry, args=(source, target, of), daemon=True
                    ).start()

    def _carry(self, source, target, rank):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                arrives = data if rank is None else self.harm(rank, data)
                if arrives is None:
                    return  # both ends stay open, and receive nothing
                target.sendall(arrives)
            target.shutdown(socket.SHUT_WR)


class _Rewiring(MemoryCoordination):
    def __init__(self, board, wire):
        super().__init__(board)
        self._wire = wire

    def post(self, key, value, /):
        kind, _, rank = key.partition("/")[0], None, key.rpartition("/")[2]
        if kind == "line" and value != b"-":
            value = json.dumps(self._wire.address_for(int(rank), tuple(json.loads(value)))).encode()
        super().post(key, value)
