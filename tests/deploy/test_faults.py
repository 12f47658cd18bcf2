"""`make test-faults`, most of an hour: 20 kills each of a site, the ServerApp and the SuperLink, and a minute's cut."""

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
PARTS = (
    ["everything"] * 5
    + ["fedstill.deploy.site.supernode"] * 2
    + ["fedstill.deploy.site.client"] * 2
    + ["flwr-clientapp"]
)


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


def at_random(course: Course, since: int, rng: random.Random) -> str:
    """Wait until some point of a run that is being resumed; where that is."""
    if rng.random() < 0.35:
        wait = rng.uniform(0, 15)
        course.wait(course.servers, "ServerApp")
        time.sleep(wait)
        kinds = [event["event"] for event in course.events(None, since)]
        known = [kind for kind in ("run_started", "joining", "joined", "resumed") if kind in kinds]
        return f"{wait:.1f} s after its process began, {known[-1] if known else 'nothing written'}"
    taken = course.wait_for("resumed", since, seconds=300)["round"]
    wait = rng.uniform(0, 4)
    time.sleep(wait)
    return f"took up {taken}, {wait:.1f} s later in round {course.events('round_started')[-1]['round']}"


def test_the_server_app_is_killed_again_and_again(course: Course) -> None:
    rng, began, since = random.Random(SEED + 1), time.monotonic(), 0
    row("ServerApp", "where it was killed")
    course.kill_server()
    for _ in range(KILLS):
        since = course.now()
        course.resume()
        row("killed", at_random(course, since, rng))
        course.kill_server()
    course.resume()
    course.wait_for("round_finished", course.now(), count=2, seconds=300)
    row("resumed and repeated", course.check(), f"{time.monotonic() - began:.0f} s")
    for name in course.hosts.sites:
        assert course.answered_twice(name) == []


def test_the_superlink_is_killed_again_and_again(course: Course) -> None:
    rng, coordinator, began = random.Random(SEED + 2), course.hosts.coordinator, time.monotonic()
    row("SuperLink", "where the run was")
    for number in range(KILLS + 1):
        again = coordinator.restarts
        [superlink] = coordinator.processes("bin/flower-superlink")
        superlink.kill()
        course.wait(lambda again=again: coordinator.restarts > again, "restart of the coordinator")  # type: ignore[misc]
        coordinator.healthy()
        since = course.now()
        course.resume()
        if number < KILLS:
            row("killed", at_random(course, since, rng))
    course.wait_for("round_finished", course.now(), count=2, seconds=300)
    row("resumed and repeated", course.check(), f"{time.monotonic() - began:.0f} s")
    for name in course.hosts.sites:
        assert course.answered_twice(name) == []


@pytest.mark.parametrize("patient", [False, True], ids=["given up and invited again", "waited for"])
def test_a_minute_without_the_network(course: Course, patient: bool) -> None:
    north = course.hosts.sites["north"]
    if patient:
        config = course.run / "config.toml"
        config.write_text(
            config.read_text().replace("reconnect = 3.0", "reconnect = 120.0").replace("= 60.0", "= 200.0")
        )
        since = course.now()
        course.kill_server()
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
    course.kill_server()
    summary = course.finish(rounds=3)
    assert summary["status"] == "finished"
    row("rounds", summary["rounds"], "resumed and repeated", course.check())
