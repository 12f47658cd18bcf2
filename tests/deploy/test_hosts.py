"""The compose file's coordinator and sites on hosts of their own, with TLS and keys: disturbed, the run goes on."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedstill.deploy.watch.app import Serving, open_door
from fedstill.deploy.watch.follow import Folder
from tests import browser

from .course import RUN, Course
from .hosts import ROOT, Host, Hosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SITES = ["north", "east"]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    """A run that is under way; every test leaves it so."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "run.toml").write_text(RUN.format(reconnect=8, deadline=12))
    with Hosts(folder, SITES, sizes={"coordinator": "500m", "north": "300m"}) as hosts:
        hosts.start(known=True)
        made = Course(hosts, folder)
        made.begin()
        made.wait_for("round_finished", count=2)
        yield made


def fill(host: Host) -> Path:
    """Leave no room on a host's disk; the file to remove."""
    filler = host.folder / host.name / "filler"
    with contextlib.suppress(AssertionError):  # dd says that the disk is full
        host.enter("dd", "if=/dev/zero", f"of={filler}", "bs=1M")
    return filler


def lives(pid: int) -> bool:
    """A dead process that nobody has collected yet holds no namespace."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_nothing_is_left_of_hosts_whose_test_was_killed(tmp_path: Path) -> None:
    code = "import sys, time, pathlib; from tests.deploy.hosts import Hosts\n"
    code += "made = Hosts(pathlib.Path(sys.argv[1]), ['north']); made.coordinator.start()\n"
    code += "while made.coordinator.init() is None: time.sleep(0.1)\n"
    code += "print(made.coordinator.init(), *(host.pid for host in made.hosts.values()), flush=True); time.sleep(60)"
    maker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert maker.stdout is not None
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 3
    assert all(psutil.pid_exists(pid) for pid in pids)
    maker.kill()
    maker.communicate()
    end = time.monotonic() + 20
    while any(map(lives, pids)):
        assert time.monotonic() < end, "a killed test leaves processes behind, and with them its namespaces"
        time.sleep(0.1)


def test_hosts_reach_the_coordinator_and_nobody_else(course: Course) -> None:
    north, east = course.hosts.sites.values()
    assert north.service["user"] == "10001:10001"
    assert {process.uids().real for process in north.processes("fedstill.deploy.site.supernode")} == {10001}
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
    north.run("python", "-c", reach, "coordinator", "9092")
    for address, port in (("coordinator", "8000"), ("10.77.2.1", "9092"), ("10.77.2.2", "9110"), ("1.1.1.1", "443")):
        north.run("python", "-c", reach, address, port, code=1)
    assert not (east.volume() / "site.key").samefile(north.volume() / "site.key")


def test_a_cut_shorter_than_the_patience_heals_and_nothing_counts_twice(course: Course) -> None:
    since, north = course.now(), course.hosts.sites["north"]
    north.cut(True)
    time.sleep(5)
    north.cut(False)
    course.wait_for("round_finished", course.now(), count=2)
    assert course.events("disconnected", since, site="north")
    assert not course.events("left_out", since)
    assert not course.events("readmitted", since)
    assert course.answered_twice("north") == []


def test_a_slow_site_is_left_behind_at_its_deadline_and_let_in_again(course: Course) -> None:
    since, east = course.now(), course.hosts.sites["east"]
    [app] = east.processes("flwr-clientapp")
    app.send_signal(signal.SIGSTOP)
    try:
        late = course.wait_for("left_out", since, site="east")
        assert "no answer within 12 s" in late["reason"] or "did not come back within 8 s" in late["reason"]
    finally:
        app.send_signal(signal.SIGCONT)
    assert course.wait_for("readmitted", since, site="east")["missed"]
    assert course.answered_twice("east") == []


def _flat(path: Path) -> str:
    return " ".join(path.read_text(errors="replace").split())


def test_a_full_disk_at_a_site_leaves_it_out_until_there_is_room(course: Course) -> None:
    since, north = course.now(), course.hosts.sites["north"]
    filler = fill(north)
    left = course.wait_for("left_out", since, site="north")
    assert "/fedstill/state/north" in left["reason"]
    assert "No space left on device" in left["reason"]
    assert "free some space" in left["reason"]
    north.enter("rm", str(filler))
    done = course.wait_for("round_finished", course.now(), count=3)["round"]
    assert not course.events("left_out", round=done, site="north")
    assert course.answered_twice("north") == []


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static const long AHEAD = 300;
int clock_gettime(clockid_t id, struct timespec *at) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, at);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) at->tv_sec += AHEAD;
    return code;
}
time_t time(time_t *to) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (to) *to = at.tv_sec;
    return at.tv_sec;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    to->tv_sec = at.tv_sec, to->tv_usec = at.tv_nsec / 1000;
    return 0;
}
"""


def test_a_clock_five_minutes_off_is_named_with_its_cure(course: Course) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler to make a shifted clock with")
    east = course.hosts.sites["east"]
    source, made = east.folder / "clock.c", east.folder / "east/clock.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-O", "-o", made, source, "-ldl"], check=True)
    east.settings["LD_PRELOAD"] = "/fedstill/clock.so"
    try:
        found = east.run("flower-client", "--site", "/etc/fedstill/site.toml", "--check", code=1)
    finally:
        del east.settings["LD_PRELOAD"]
    [line] = [line for line in found.splitlines() if line.startswith("failed  clock")]
    seconds = int(line.split("is ")[1].split(" s ")[0])
    assert "ahead of the SuperLink's" in line
    assert abs(seconds - 300) <= 2
    assert "timedatectl set-ntp true" in found


@pytest.mark.skipif(browser.why_not() is not None, reason=str(browser.why_not()))
def test_a_killed_site_is_shown_on_the_live_page_until_it_is_back(course: Course) -> None:
    from playwright.sync_api import expect

    serving = Serving(Folder(course.run, steer=False), open_door(port=0)).start()
    try:
        with browser.chromium() as chromium:
            page = chromium.new_page()
            page.goto(serving.door.url)
            card = page.locator('[data-site="north"]')
            expect(card.locator(".why")).to_have_count(0)
            since = course.now()
            course.hosts.sites["north"].power_off()
            reason = course.wait_for("left_out", since, site="north")["reason"]
            expect(card).to_contain_text("left out")
            expect(card.locator(".why")).to_have_text(" ".join(reason.split()))
            course.wait_for("readmitted", since, site="north")
            expect(page.get_by_role("log")).to_contain_text("north is back.")
            expect(card.locator(".why")).to_have_count(0)
    finally:
        serving.stop()


def test_a_site_and_the_coordinator_are_lost_and_no_round_is(course: Course) -> None:
    """Power off at a site, then the coordinator's disk full, then kill -9 of its SuperLink."""
    since, coordinator = course.now(), course.hosts.coordinator
    course.hosts.sites["north"].power_off()
    course.wait_for("readmitted", since, site="north")
    filler = fill(coordinator)
    course.wait(lambda: not course.servers(), "end of the ServerApp")
    shown = course.folder / "course.txt"
    course.wait(lambda: f"disk of /fedstill/runs/{course.name} is full" in _flat(shown), "word of the full disk")
    told = course.hosts.sites["east"].log(100)  # the sites hear of it, whatever Flower can still write down
    assert f"/fedstill/runs/{course.name}" in told
    assert "cannot be written (No space left on device); free some space" in told
    coordinator.enter("rm", str(filler))
    restarts = coordinator.restarts
    for superlink in coordinator.processes("bin/flower-superlink"):
        superlink.kill()
    course.wait(lambda: coordinator.restarts > restarts, "restart of the coordinator")
    coordinator.healthy()
    summary = course.finish(rounds=3)
    assert summary["status"] == "finished"
    assert set(summary["sites"]) == {"north", "east"}
    resumes, repeated = course.check()
    assert (resumes, repeated <= 1) == (1, True)
    assert course.answered_twice("north") == course.answered_twice("east") == []
    assert (course.run / "central/model.safetensors").exists()
