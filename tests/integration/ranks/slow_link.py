"""A TCP connection that takes its time, between processes and a server of this machine."""

import contextlib
import socket
import threading
import time


class SlowLink:
    """Forwards connections to a port; delays the server's answers by `delay_s`."""

    def __init__(self, port):
        self.delay_s = 0.0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [client, server]
                for source, target, slow in ((client, server, False), (server, client, True)):
                    words = (source, target, slow)
                    threading.Thread(target=self._pass_on, args=words, daemon=True).start()

    def _pass_on(self, source, target, slow):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if slow:
                    time.sleep(self.delay_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
