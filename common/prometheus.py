"""Numbers for Prometheus: its text format, and a small server for them on this machine's own address."""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from fedstill.common.config import ConfigError

log = logging.getLogger("flwr")
Labels = dict[str, str]


@dataclass(frozen=True)
class Metric:
    """One number, or one for each set of labels."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    values: list[tuple[Labels, float]]


def text_of(metrics: Iterable[Metric]) -> str:
    """Return the metrics as Prometheus reads them."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.values:
            shown = ",".join(f'{name}="{_escaped(label)}"' for name, label in labels.items())
            lines.append(f"{metric.name}{{{shown}}} {value:g}" if shown else f"{metric.name} {value:g}")
    return "\n".join(lines) + "\n"


class MetricsServer:
    """Serves /metrics from what `collect` returns, until it is closed."""

    def __init__(self, address: str, collect: Callable[[], Iterable[Metric]]) -> None:
        host, _, port = address.rpartition(":")
        try:
            local = ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            local = host == "localhost"
        if not local or not port.isdigit():
            raise ConfigError(
                f"metrics = {address!r}: they tell who takes part and when, so they are served to this machine only; "
                'write "127.0.0.1:9464" and let a Prometheus on this machine read them'
            )

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.partition("?")[0] == "/metrics"
                try:
                    body = text_of(collect()).encode() if known else b"see /metrics\n"
                except Exception:  # a number that cannot be had must not end a run
                    log.exception("metrics cannot be collected")
                    self.send_error(500)
                    return
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        try:
            self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        except OSError as error:
            raise ConfigError(
                f"metrics = {address!r}: cannot listen there ({error.strerror}); name another port"
            ) from None
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
