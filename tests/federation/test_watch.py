"""The live page in a real browser: a run in flight, a site lost and back, stop and resume, hostile names."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fedstill.common.config import RunConfig
from fedstill.common.wire import Ask, Failure, Reply
from fedstill.deploy.watch.app import Serving, open_door
from fedstill.deploy.watch.follow import Folder
from fedstill.server.link import LocalLink
from tests.browser import chromium, why_not

from .conftest import Federation

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
Show = Callable[[Path], Any]
COMMAND = str(Path(sys.executable).parent / "fedstill")
QUICK = ("report.alone=false", "report.centralized=false", "exchange.quorum=0.5")


class Held(LocalLink):
    """A link that waits before a step until the test has looked; `north` may fall out of the first training."""

    def __init__(self, made: Federation, lost: bool = False) -> None:
        super().__init__(made.nodes, made.admit())
        self.lost, self.waits, self.go_on = lost, threading.Event(), threading.Event()

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        at = next(iter(parts.values()))
        for outcome in super().deliver(parts, deadline):
            gone = self.lost and (outcome.node, at.verb, at.settings["round"]) == ("north", "train.local", 1)
            yield Failure("north", "no answer within 900 s", gone=True) if gone else outcome
            if (at.verb, at.settings["round"], outcome.node) == ("train.local", 1 if self.lost else 2, "north"):
                self.waits.set()
                assert self.go_on.wait(120)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def show(browser: Any) -> Iterator[Show]:
    """Open the page of a run's folder; whatever its scripts complain about fails the test."""
    opened: list[tuple[Serving, Any, list[str]]] = []

    def open_page(folder: Path, **context: Any) -> Any:
        serving = Serving(Folder(folder), open_door(port=0)).start()
        page = browser.new_context(**context).new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.goto(serving.door.url)
        opened.append((serving, page, wrong))
        return page

    yield open_page
    for serving, page, wrong in opened:
        assert wrong == []
        page.context.close()
        serving.stop()


def start(made: Federation, link: LocalLink) -> threading.Thread:
    made.record.event("run_started", run="run", method="fedid", resume=False, pid=1)
    thread = threading.Thread(target=made.run, args=(link,), daemon=True)
    thread.start()
    return thread


def card(page: Any, site: str) -> Any:
    return page.locator(f'[data-site="{site}"]')


def test_a_run_in_flight(federation: Make, small: Small, show: Show) -> None:
    from playwright.sync_api import expect

    made = federation(small(*QUICK, "rounds=3"))
    link = Held(made)
    thread = start(made, link)
    assert link.waits.wait(120)
    page = show(made.record.folder)
    expect(page.locator("#status")).to_have_text("running")
    expect(page.locator("#figures")).to_contain_text("2 of 3")
    expect(page.locator("#figures")).to_contain_text("at the pace so far")
    expect(page.locator("#wire")).to_contain_text("train.local to north, south; waiting for south")
    expect(card(page, "south")).to_contain_text("working")
    expect(card(page, "north")).to_contain_text("tiny-bert")
    expect(page.locator("#agreement")).to_contain_text("chance would be 49 %")
    expect(page.locator("#pseudo")).to_contain_text("In the last pass their mean was right for")
    expect(page.get_by_role("log")).to_contain_text("Round 2 of 3.")
    before = page.locator("#curves circle").count()
    link.go_on.set()
    thread.join(120)
    expect(page.locator("#status")).to_have_text("finished")
    expect(page.locator("#figures")).to_contain_text("3 of 3")
    assert page.locator("#curves circle").count() == 12 > before  # central and two sites, rounds 0 to 3
    sent = made.federation.costs.site("north")["bytes_up"]
    assert f"{sent / 1000:.1f}\u00a0kB" in card(page, "north").inner_text()


def test_a_site_that_is_lost_is_shown_with_its_reason_until_it_is_back(
    federation: Make, small: Small, show: Show
) -> None:
    from playwright.sync_api import expect

    made = federation(small(*QUICK, "rounds=2"))
    link = Held(made, lost=True)
    thread = start(made, link)
    assert link.waits.wait(120)
    page = show(made.record.folder)
    expect(card(page, "north")).to_contain_text("left out")
    expect(card(page, "north").locator(".why")).to_have_text("no answer within 900 s")
    expect(card(page, "south").locator(".why")).to_have_count(0)
    link.go_on.set()
    thread.join(120)
    expect(page.get_by_role("log")).to_contain_text("north is back.")
    expect(card(page, "north").locator(".why")).to_have_count(0)
    expect(card(page, "north")).to_contain_text("1 time")


def test_stop_after_this_round_and_resume(tmp_path: Path, small_file: Path, show: Show) -> None:
    from playwright.sync_api import expect

    options = ["--on", "process", "--no-check", "--set", "rounds=60", "--set", "report.alone=false"]
    process = subprocess.Popen([COMMAND, "run", str(small_file), *options], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        while not (tmp_path / "runs/latest/events.jsonl").exists():
            assert process.poll() is None
        folder = (tmp_path / "runs/latest").resolve()
        page = show(folder)
        expect(page.get_by_role("log")).to_contain_text("Round 1 of 60.", timeout=60_000)
        page.get_by_role("button", name="Stop after this round").press("Enter")
        expect(page.locator("#status")).to_have_text("stopped", timeout=60_000)
        assert process.wait(60) == 130
        assert process.stdout is not None
        assert "To go on" in process.stdout.read().decode().replace("to go on", "To go on")
    finally:
        process.kill()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "stopped"
    stopped = int(summary["reason"].split("round ")[1].split(",")[0])
    assert stopped < 60
    expect(page.get_by_role("button", name="Stop after this round")).to_be_disabled()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("log")).to_contain_text(f"Taken up after round {stopped}.", timeout=60_000)
    page.get_by_role("button", name="Stop after this round").click()
    expect(page.locator("#status")).to_have_text("stopped", timeout=60_000)
    assert f"stopped after round {stopped}," not in json.loads((folder / "summary.json").read_text())["reason"]


def test_words_from_outside_are_words(tmp_path: Path, show: Show) -> None:
    from playwright.sync_api import expect

    hostile = "<img src=x onerror=alert(1)>"
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    site = {"family": hostile, "model": hostile, "texts": 3, "labels": [hostile, "</script><script>alert(2)</script>"]}
    events: list[dict[str, Any]] = [
        {"event": "run_started", "run": hostile, "method": hostile, "resume": False, "pid": 1},
        {"event": "joined", "sites": {hostile: site, "__proto__": site, "b": site}},
        {"event": "round_started", "round": 1, "rounds": 2, "sites": [hostile]},
        {"event": "left_out", "round": 1, "site": hostile, "verb": hostile, "reason": f"{hostile} javascript:alert(3)"},
        {"event": "warning", "round": 1, "who": hostile, "what": hostile, "likely": hostile, "change": hostile},
        {"event": "agreement", "round": 1, "mean": 0.5, "chance": 0.5, "pairs": {f"{hostile} b": 0.5},
         "classes": {hostile: [0.5, 0.5], "b": [1.0, 0.0]}},
        {"event": "round_finished", "round": 1, "rounds": 2, "metrics": {}, "central": {"accuracy": 0.5},
         "sites": {hostile: {"accuracy": 0.5}}},
        {"event": "run_failed", "reason": f"{hostile}\n<script>alert(4)</script>"},
    ]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"time": now, **event}) + "\n" for event in events))
    page = show(tmp_path)
    expect(page.locator("#status")).to_have_text("failed")
    expect(page.locator("#title")).to_have_text(hostile)
    expect(page.locator("#reason")).to_contain_text("<script>alert(4)</script>")
    expect(page.locator("#sites h3").first).to_have_text(hostile)
    assert page.locator("img").count() == 0
    assert page.locator("body script:not([src])").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone_and_used_by_keyboard(
    federation: Make, small: Small, show: Show, scheme: str
) -> None:
    from playwright.sync_api import expect

    made = federation(small(*QUICK, "rounds=1"))
    thread = start(made, LocalLink(made.nodes, made.admit()))
    thread.join(120)
    page = show(made.record.folder, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    expect(page.locator("#status")).to_have_text("finished")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 200) == (scheme == "dark")
    page.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("table").first).to_be_visible()
    expect(page.get_by_role("img", name="accuracy by round")).to_be_visible()
    unnamed = "[...document.querySelectorAll('section')].filter((each) => !each.getAttribute('aria-labelledby')).length"
    assert page.evaluate(unnamed) == 0
