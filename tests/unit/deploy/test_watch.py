"""Who may see the live page and who may steer: names, tokens, TLS, and requests that other pages send."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedstill.common.config import ConfigError
from fedstill.deploy.coordinator.certificates import make_certificates
from fedstill.deploy.watch.app import KEY, Serving, open_door
from fedstill.deploy.watch.follow import Folder
from fedstill.server.record import STOP


class Caller:
    """A client that says what it likes."""

    def __init__(self, serving: Serving, authority: Path | None = None) -> None:
        self.port, self.door = serving.door.socket.getsockname()[1], serving.door
        self.trust = None if authority is None else ssl.create_default_context(cafile=str(authority))

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, str, Any]:
        kind = http.client.HTTPConnection if self.trust is None else http.client.HTTPSConnection
        more = {} if self.trust is None else {"context": self.trust}
        line = kind("localhost", self.port, timeout=10, **more)
        line.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = line.getresponse()
        return answer.status, answer.read().decode(), answer.headers

    def post(self, path: str, **headers: str) -> int:
        return self.ask("POST", path, **headers)[0]


def write(folder: Path, *events: dict[str, Any]) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    lines = [json.dumps({"time": now, **event}) for event in events]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")


STARTED = {"event": "run_started", "run": "run", "method": "fedid", "resume": False, "pid": os.getpid()}


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Caller]:
    write(tmp_path, STARTED)
    serving = Serving(Folder(tmp_path), open_door(port=0)).start()
    yield Caller(serving)
    serving.stop()


def test_the_page_brings_everything_itself_and_allows_nothing_else(plain: Caller) -> None:
    status, page, headers = plain.ask("GET", "/")
    assert status == 200
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe-inline" not in headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert set(links) == {"data:,", "style.css", "charts.js", "story.js", "live.js"}
    for name in links[1:]:
        status, text, headers = plain.ask("GET", f"/{name}")
        assert status == 200
        assert headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert "innerHTML" not in text
    assert plain.ask("GET", "/../../etc/passwd")[0] == 404
    assert plain.ask("GET", "/app.py")[0] == 404


def test_other_pages_cannot_steer(plain: Caller, tmp_path: Path) -> None:
    assert plain.post("/stop") == 403
    assert plain.post("/stop", X_Fedstill_Key="guessed") == 403
    assert plain.ask("GET", "/stop")[0] == 405
    assert plain.post("/stop", Host="evil.example", X_Fedstill_Key=plain.door.key) == 421
    assert plain.ask("GET", "/", Host="evil.example:8700")[0] == 421
    assert not (tmp_path / STOP).exists()
    assert KEY == "x-fedstill-key"
    assert plain.post("/stop", X_Fedstill_Key=plain.door.key) == 200
    assert (tmp_path / STOP).exists()
    assert plain.post("/go-on", X_Fedstill_Key=plain.door.key) == 200
    assert not (tmp_path / STOP).exists()
    assert plain.post("/resume", X_Fedstill_Key=plain.door.key) == 409  # it runs


def test_a_page_that_only_looks_does_not_steer(tmp_path: Path) -> None:
    write(tmp_path, STARTED)
    serving = Serving(Folder(tmp_path, steer=False), open_door(port=0)).start()
    assert Caller(serving).post("/stop", X_Fedstill_Key=serving.door.key) == 403
    assert not (tmp_path / STOP).exists()
    serving.stop()


def test_another_address_needs_certificates_and_gets_a_token(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "192.0.2.7", "::", "example.org"):
        with pytest.raises(ConfigError, match="needs TLS: give --certificates"):
            open_door(host, 0)
    make_certificates(tmp_path)
    with pytest.raises(ConfigError, match="fewer than 16"):
        open_door("0.0.0.0", 0, tmp_path, "short")
    door = open_door("0.0.0.0", 0, tmp_path)
    assert door.token is not None
    assert len(door.token) >= 32
    assert door.url.startswith("https://localhost:")
    door.socket.close()


def test_with_tls_nobody_comes_in_without_the_token(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "certificates")
    write(tmp_path, STARTED)
    door = open_door("127.0.0.1", 0, tmp_path / "certificates", "a token of some length")
    serving = Serving(Folder(tmp_path), door).start()
    caller, right = Caller(serving, files.authority), "Bearer a token of some length"
    for path in ("/", "/events", "/live.js"):
        assert caller.ask("GET", path)[0] == 401
        assert caller.ask("GET", path, Authorization="Bearer another")[0] == 401
    assert caller.post("/stop", X_Fedstill_Key=door.key) == 401
    assert caller.ask("GET", "/live.js", Authorization=right)[0] == 200
    status, _, headers = caller.ask("GET", "/?token=a%20token%20of%20some%20length")
    assert (status, headers["location"]) == (303, "/")
    for word in ("HttpOnly", "Secure", "SameSite=strict"):
        assert word in headers["set-cookie"]
    assert caller.ask("GET", "/", Cookie=headers["set-cookie"].split(";")[0])[0] == 200
    serving.stop()


def test_a_port_that_is_taken_is_refused_if_asked_for_and_else_another_is_taken(plain: Caller) -> None:
    with pytest.raises(ConfigError, match=f"--port {plain.port}"):
        open_door(port=plain.port)


def test_events_are_sent_as_they_are_written_and_taken_up_where_a_browser_left(plain: Caller, tmp_path: Path) -> None:
    line = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=20)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": "x", "event": "progress", "done": 1}) + "\n")
        file.write(json.dumps({"time": "x", "event": "progress", "done": 2}) + "\n")
    line.request("GET", "/events")
    answer = line.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")

    def following() -> tuple[int, dict[str, Any]]:
        number = 0
        while True:
            text = answer.readline().decode()
            assert text, "the stream ended"
            number = int(text.split()[1]) if text.startswith("id:") else number
            if text.startswith("data:") and number:
                return number, json.loads(text[5:])

    first, _ = following()
    second, event = following()
    assert event["done"] == 2  # of what is past only the last word
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": "x", "event": "pro')
        file.flush()
        threading.Timer(0.5, lambda: (file.write('gress", "done": 3}\n'), file.flush())).start()
        third, event = following()
        assert event["done"] == 3
    line.close()
    again = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=20)
    again.request("GET", "/events", headers={"Last-Event-ID": str(second)})
    answer = again.getresponse()
    assert following() == (third, event)
    again.close()
    assert first < second < third


def test_a_run_is_over_interrupted_or_running(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text('{"on": "coordinator", "tls": false}')
    folder = Folder(tmp_path)
    assert folder.facts()["over"]
    write(tmp_path, STARTED)
    assert not Folder(tmp_path).facts()["over"]
    write(tmp_path, {**STARTED, "pid": 2**22 + 1})
    assert not Folder(tmp_path).facts()["over"]  # another machine's: it spoke a moment ago
    old = (datetime.now(UTC) - timedelta(minutes=5)).isoformat(timespec="milliseconds")
    write(tmp_path, {**STARTED, "pid": 2**22 + 1, "time": old})
    facts = Folder(tmp_path).facts()
    assert (facts["over"], facts["resumable"]) == (True, True)
    write(tmp_path, STARTED, {"event": "run_finished", "central": {}, "seconds": {}})
    assert Folder(tmp_path).facts()["over"]
    (tmp_path / STOP).touch()
    assert not Folder(tmp_path).facts()["stopping"]
