"""`make test-faults`, about 40 minutes: 20 kills each of a site, the ServerApp and the SuperLink, and a minute's cut."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import psutil
import pytest

from .course import RUN, Course
from .hosts import Host, Hosts, why_not

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
KILLS = int(os.environ.get("FEDSTILL_KILLS", "20"))
SEED = 20261116
PARTS = ["everything"] * 5 + ["bin/flower-supernode"] * 2 + ["fedstill.deploy.site"] * 2 + ["flwr-clientapp"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("faults"), ["north", "east"]) as made:
        made.start()
        yield made


@pytest.fixture(scope="module")
def course(hosts: Hosts) -> Iterator[Course]:
    """One run through all kills."""
    folder = hosts.coordinator.folder
    (folder / "run.toml").write_text(RUN.format(reconnect=3, deadline=60))
    hosts.coordinator.stop()  # its container gets the run's file when it starts
    hosts.coordinator.start()
    hosts.coordinator.healthy()
    made = Course(hosts, folder)
    made.begin()
    made.wait_for("round_finished", count=2)
    yield made
    made.leave()


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def hit(host: Host, part: str) -> bool:
    """kill -9 of everything on a host, or of its processes with `part` in their command line."""
    if part == "everything":
        host.power_off()
        return True
    found = host.processes(part)
    for process in found:
        try:
            process.kill()
        except psutil.Error:
            return False
    return bool(found)


def test_a_site_is_killed_again_and_again(course: Course) -> None:
    rng = random.Random(SEED)
    row("site", "what was killed", "in round", "verb that missed it", "back in round", "seconds")
    for _ in range(KILLS):
        name, part = rng.choice(list(course.hosts.sites)), rng.choice(PARTS)
        time.sleep(rng.uniform(0, 3))
        since, began = course.now(), time.monotonic()
        place = course.events("round_started")[-1]["round"]
        while not hit(course.hosts.sites[name], part):
            time.sleep(0.5)
        back = course.wait_for("readmitted", since, site=name, seconds=300)
        left = course.events("left_out", since, site=name)
        verb = left[0]["verb"] if left else "none"
        row(name, part, place, verb, back["round"], f"{time.monotonic() - began:.0f}")
    assert course.check() == (0, 0)
    for name in course.hosts.sites:
        assert course.answered_twice(name) == []


def resumed(course: Course, known: int) -> str:
    """How far the newest start of the ServerApp came."""
    lives = course.lives()
    if len(lives) == known:
        return "before it wrote anything"
    life = lives[-1]
    if not life.took_up:
        return "while the sites joined"
    return f"took up {life.resumed}, in round {life.started[-1] if life.started else life.resumed}"


def test_the_server_app_is_killed_again_and_again(course: Course) -> None:
    rng = random.Random(SEED + 1)
    row("ServerApp", "seconds after its start", "where it was killed")
    known, began = len(course.lives()) - 1, time.monotonic()
    for _ in range(KILLS):
        wait = rng.uniform(0, 40)
        server = course.wait(course.server, "ServerApp")
        time.sleep(wait)
        server.kill()
        row("killed", f"{wait:.0f}", resumed(course, known))
        known = len(course.lives())
        course.resume()
        course.wait(lambda old=server.pid: (now := course.server()) and now.pid != old, "new ServerApp")  # type: ignore[misc]
    course.wait_for("round_finished", course.now(), count=2)
    row("resumed and repeated", course.check(), f"{time.monotonic() - began:.0f} s")
    for name in course.hosts.sites:
        assert course.answered_twice(name) == []


def test_the_superlink_is_killed_again_and_again(course: Course) -> None:
    rng = random.Random(SEED + 2)
    coordinator, began = course.hosts.coordinator, time.monotonic()
    row("SuperLink", "seconds after the resume", "where the run was")
    known = len(course.lives()) - 1
    for _ in range(KILLS):
        wait = rng.uniform(0, 50)
        time.sleep(wait)
        again = coordinator.restarts
        [superlink] = coordinator.processes("bin/flower-superlink")
        superlink.kill()
        row("killed", f"{wait:.0f}", resumed(course, known))
        course.wait(lambda again=again: coordinator.restarts > again, "restart of the coordinator")  # type: ignore[misc]
        coordinator.healthy()
        known = len(course.lives())
        course.resume()
    since = course.now()
    course.wait_for("round_finished", since, count=2)
    row("resumed and repeated", course.check(), f"{time.monotonic() - began:.0f} s")


@pytest.mark.parametrize("patient", [False, True], ids=["given up and invited again", "waited for"])
def test_a_minute_without_the_network(course: Course, patient: bool) -> None:
    north = course.hosts.sites["north"]
    if patient:
        config = course.run / "config.toml"
        config.write_text(config.read_text().replace("reconnect = 3.0", "reconnect = 120.0").replace("= 60.0", "= 200.0"))
        server, since = course.server(), course.now()
        assert server is not None
        server.kill()
        course.resume()
        course.wait_for("round_finished", since)
    since, began = course.now(), time.monotonic()
    north.cut(True)
    time.sleep(60)
    north.cut(False)
    if patient:
        course.wait_for("round_finished", course.now(), count=2)
        assert not course.events("left_out", since)
    else:
        course.wait_for("readmitted", since, site="north", seconds=300)
    row("cut of 60 s", "waited for" if patient else "let in again", f"whole after {time.monotonic() - began:.0f} s")
    course.check()
    assert course.answered_twice("north") == []


def test_the_run_ends(course: Course) -> None:
    summary = course.finish(rounds=3)
    assert summary["status"] == "finished"
    row("rounds", summary["rounds"], "resumed and repeated", course.check())
