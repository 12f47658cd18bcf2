"""Numbers for Prometheus: their format, who may read them, and that dashboard and alerts ask for numbers that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedstill.client.node import Node
from fedstill.common.config import ConfigError, RunConfig, SiteConfig
from fedstill.common.prometheus import Metric, MetricsServer, text_of
from fedstill.common.wire import Ask
from fedstill.deploy.site.observed import SiteNumbers

ROOT = Path(__file__).parents[3]
FILES = ROOT / "deploy/monitoring"
NAMES = re.compile(r"\bfedstill_[a-z_]+")


def test_the_text_is_prometheus_own() -> None:
    text = text_of(
        [Metric("a_total", "counter", "A.", [({"site": 'x"y\n'}, 3.0)]), Metric("b", "gauge", "B.", [({}, 0.5)])]
    )
    assert (
        text
        == '# HELP a_total A.\n# TYPE a_total counter\na_total{site="x\\"y "} 3\n# HELP b B.\n# TYPE b gauge\nb 0.5\n'
    )


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "192.0.2.1:9464", ":9464", "coordinator.example.org:9464", "127.0.0.1"]
)
def test_nobody_else_reads_them(address: str) -> None:
    with pytest.raises(ConfigError, match="served to this machine only"):
        MetricsServer(address, list)


def test_a_number_that_cannot_be_had_is_an_error_of_that_page_alone() -> None:
    def collect() -> list[Metric]:
        raise RuntimeError("not now")

    server = MetricsServer("127.0.0.1:0", collect)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/")
    server.close()


def test_a_sites_numbers_come_from_its_ledger_and_budget(
    small: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTILL_STATE", str(tmp_path))
    config = small("sites.north.privacy={epsilon = 50.0, noise_multiplier = 4.0}")
    site: SiteConfig = config.sites[0]
    node, numbers = Node(config, site, "run", tmp_path / "north"), SiteNumbers(site)
    node.answer(Ask("query.predictions", {"rows": np.arange(4)}, {"round": 3}))
    for _ in range(2):
        with pytest.raises(ValueError, match="not declared safe"):
            node.answer(Ask("query.counts"))
    server = MetricsServer("127.0.0.1:0", numbers)
    found = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
    server.close()
    assert "fedstill_site_round 3\n" in found
    assert 'fedstill_site_answers_total{verb="query.predictions"} 1\n' in found
    assert 'fedstill_site_refusals_total{verb="query.counts"} 2\n' in found
    left = float(re.findall(r"^fedstill_site_budget_left (.*)", found, re.MULTILINE)[0])
    assert 0 < left < 50
    node.answer(Ask("query.predictions", {"rows": np.arange(4)}, {"round": 4}))
    again = {metric.name: metric.values for metric in numbers()}  # only what came since is read
    assert again["fedstill_site_round"] == [({}, 4)]
    assert again["fedstill_site_answers_total"] == [({"verb": "query.predictions"}, 2)]
    assert ({"verb": "train.weights"}, 0) in again["fedstill_site_refusals_total"]  # or its first would be no increase
    before = len(again["fedstill_site_refusals_total"])
    for number in range(20):
        with pytest.raises(RuntimeError, match="no method that is installed here"):
            node.answer(Ask(f"query.made-up-{number}"))
    refused = {metric.name: metric.values for metric in numbers()}["fedstill_site_refusals_total"]
    assert ({"verb": "other"}, 20) in refused  # no label for every name that a coordinator makes up
    assert len(refused) == before


def declared() -> set[str]:
    sources = [ROOT / "server/observed.py", ROOT / "deploy/site/observed.py"]
    return {name for path in sources for name in re.findall(r'"(fedstill_[a-z_]+)"', path.read_text())}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
@pytest.mark.parametrize("command", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"],
                                     ["check", "config", "prometheus.yml"]])  # fmt: skip
def test_alerts_fire_when_they_must_and_only_then(command: list[str], tmp_path: Path) -> None:
    for file in (FILES / "alerts.yml", FILES / "prometheus.yml", Path(__file__).with_name("alerts.test.yml")):
        shutil.copy(file, tmp_path)
    done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried_both_ways() -> None:
    rules = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"][0]["rules"]
    tried = [one for test in yaml.safe_load(Path(__file__).with_name("alerts.test.yml").read_text())["tests"]
             for one in test["alert_rule_test"]]  # fmt: skip
    for fires in (True, False):
        missing = {rule["alert"] for rule in rules} - {
            o["alertname"] for o in tried if bool(o.get("exp_alerts")) == fires
        }
        assert not missing


def test_the_dashboard_is_one_that_grafana_can_show() -> None:
    """Grafana itself is in no registry that is reached from here: this is what its importer looks at."""
    dashboard = json.loads((FILES / "grafana.json").read_text())
    [source] = dashboard["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert isinstance(dashboard["schemaVersion"], int)
    assert 0 < len(dashboard["uid"]) <= 40
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] == "timeseries"
        assert panel["datasource"] == {"type": "prometheus", "uid": f"${{{source['name']}}}"}
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert x + w <= 24
        assert not cells & taken
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_counters_are_shown_as_rates_and_gauges_as_they_are() -> None:
    dashboard = json.loads((FILES / "grafana.json").read_text())
    rules = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in [*asked, *(rule["expr"] for rule in rules)]:
        for name in NAMES.findall(expression):
            assert name.endswith("_total") == bool(re.search(rf"(rate|increase)\({name}\[", expression)), expression


def test_dashboard_and_alerts_ask_for_numbers_that_exist_and_show_all_of_them() -> None:
    dashboard = json.loads((FILES / "grafana.json").read_text())
    shown = {name for panel in dashboard["panels"] for t in panel["targets"] for name in NAMES.findall(t["expr"])}
    assert shown == declared()
    rules = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len(rules) >= 6
    assert {name for rule in rules for name in NAMES.findall(rule["expr"])} <= declared()
    assert all(rule["annotations"]["summary"] for rule in rules)
    assert yaml.safe_load((FILES / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]
