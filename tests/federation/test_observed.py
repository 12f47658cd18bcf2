"""The coordinator's numbers while a run goes on over real streams."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from fedstill.common.config import RunConfig
from fedstill.common.prometheus import MetricsServer, text_of
from fedstill.common.wire import Ask, Reply
from fedstill.common.wire.frames import METHOD, grpc_options
from fedstill.deploy.site.observed import SiteNumbers
from fedstill.server.observed import coordinator

from .conftest import Federation, spoil, streams

QUICK = ("report.alone=false", "report.centralized=false", "exchange.quorum=0.5", "method.name=ds-fl", "data.public=16")


def test_a_run_shows_its_round_its_sites_and_who_was_refused(
    federation: Callable[..., Federation], small: Callable[..., RunConfig]
) -> None:
    noise = "sites.north.privacy={epsilon = 50.0, noise_multiplier = 4.0}"
    made, seen = federation(small(*QUICK, noise)), list[str]()

    def look(ask: Ask, reply: Reply) -> Reply:
        if (ask.verb, ask.settings["round"]) == ("train.distil", 2):
            seen.append(text_of(coordinator(made.federation, link)))
        if (ask.verb, ask.settings["round"]) == ("train.local", 1):
            raise RuntimeError("not today")
        return reply

    spoil(made.nodes[1], look)
    with streams(made) as link:
        with grpc.insecure_channel(f"127.0.0.1:{link.exchange.port}", grpc_options(20)) as channel:
            assert channel.stream_stream(METHOD)(iter([])).code() is grpc.StatusCode.UNIMPLEMENTED
        made.run(link)
    [text] = seen
    for line in ("fedstill_round 2", "fedstill_rounds 2", "fedstill_sites 2", "fedstill_streams 2",
                 'fedstill_refusals_total{reason="unknown or spent token"} 1',
                 'fedstill_left_out_total{site="south"} 1',
                 'fedstill_bytes_total{site="north",way="up"} ', 'fedstill_budget_left{site="north"} ',
                 'fedstill_answer_age_seconds{site="south"} ', "fedstill_threads "):  # fmt: skip
        assert line in text, line


# --- a real Prometheus ---

FILES = Path(__file__).parents[2] / "deploy/monitoring"
NAMES = re.compile(r"\bfedstill_[a-z_]+")
NEEDED = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus")


def get(port: int, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}") as answer:
        return json.loads(answer.read())["data"]


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[int]:
    """Prometheus with the files that are shipped, on other ports and a quicker clock."""
    folder.mkdir()
    shutil.copy(FILES / "alerts.yml", folder)
    config = yaml.safe_load((FILES / "prometheus.yml").read_text())
    config["scrape_configs"][0]["static_configs"][0]["targets"] = targets
    config["scrape_configs"][0]["scrape_interval"] = config["scrape_configs"][0]["scrape_timeout"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    process = subprocess.Popen(["prometheus", *options], stderr=(folder / "log").open("w"))
    try:
        yield port
    finally:
        process.terminate()
        process.wait(30)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while True:
        try:
            if condition():
                return
        except OSError:  # it is not there yet
            pass
        assert time.monotonic() < end
        time.sleep(0.3)


@NEEDED
def test_a_real_prometheus_reads_a_run_and_a_site_and_answers_what_dashboard_and_alerts_ask(
    federation: Callable[..., Federation], small: Callable[..., RunConfig], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FEDSTILL_STATE", str(tmp_path / "federation-1/sites"))
    noise = "sites.north.privacy={epsilon = 50.0, noise_multiplier = 4.0}"
    made, numbers = federation(small(*QUICK, noise, "rounds=1")), list[MetricsServer]()

    def refuses(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "train.local":
            raise RuntimeError("not today")
        return reply

    spoil(made.nodes[1], refuses)
    with streams(made) as link:
        with grpc.insecure_channel(f"127.0.0.1:{link.exchange.port}", grpc_options(20)) as channel:
            assert channel.stream_stream(METHOD)(iter([])).code() is grpc.StatusCode.UNIMPLEMENTED
        made.run(link)
        with pytest.raises(ValueError, match="not declared safe"):
            made.nodes[0].answer(Ask("query.counts"))
        numbers.append(MetricsServer("127.0.0.1:0", lambda: coordinator(made.federation, link)))
        numbers.append(MetricsServer("127.0.0.1:0", SiteNumbers(made.config.sites[0])))
        with prometheus(tmp_path / "prometheus", [f"127.0.0.1:{server.port}" for server in numbers]) as port:
            until(lambda: len(get(port, "/api/v1/query", query="count_over_time(up[1m]) > 2")["result"]) == 2)
            targets = get(port, "/api/v1/targets")["activeTargets"]
            assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")] * 2
            dashboard = json.loads((FILES / "grafana.json").read_text())
            for panel in dashboard["panels"]:
                for target in panel["targets"]:
                    found = get(port, "/api/v1/query", query=target["expr"])["result"]
                    assert found, target["expr"]  # a panel without data
                    labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                    assert all(labels <= set(series["metric"]) for series in found), target
            [group] = get(port, "/api/v1/rules")["groups"]
            assert len(group["rules"]) >= 6
            until(lambda: all(r["health"] == "ok" for r in get(port, "/api/v1/rules")["groups"][0]["rules"]))
            refused = get(port, "/api/v1/query", query='fedstill_site_refusals_total{verb="query.counts"}')["result"]
            assert [series["value"][1] for series in refused] == ["1"]
            left = get(port, "/api/v1/query", query="fedstill_left_out_total > 0")["result"]
            assert [series["metric"]["site"] for series in left] == ["south"]
    for server in numbers:
        server.close()
