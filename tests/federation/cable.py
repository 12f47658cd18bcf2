"""A line between sites and coordinator that tests and benchmarks can read off and cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class Cable:
    """A cable between the sites and the coordinator that can be read off and pulled: TCP forwarded byte by byte."""

    def __init__(self, port: int) -> None:
        self.target, self.cuts, self.lines = port, 0, list[socket.socket]()
        self.up = self.down = 0  # bytes
        self._lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                site, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self.lines += [site, server]
            for one, two, way in ((site, server, "up"), (server, site, "down")):
                threading.Thread(target=self._carry, args=(one, two, way), daemon=True).start()

    def _carry(self, one: socket.socket, two: socket.socket, way: str) -> None:
        try:
            while data := one.recv(65536):
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
                two.sendall(data)
        except OSError:
            pass
        for end in (one, two):
            end.close()

    def pull(self) -> None:
        self.cuts += 1
        lines, self.lines = self.lines, []
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
