"""Bytes at the socket beside the papers' arithmetic, and predictions in fewer bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstill.client.session import Door, Session
from fedstill.common.config import RunConfig
from fedstill.common.states import LazyState
from fedstill.common.wire import Ask, Reply
from fedstill.common.wire.spool import Spool
from fedstill.server.exchange import Exchange

from .cable import Cable
from .conftest import Federation, streams

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]

LARGE = (
    "rounds=1",
    "data.public=1024",
    "train.max_length=8",
    "method.distill_epochs=1",
    "report.alone=false",
    "report.centralized=false",
)


def counted(made: Federation) -> tuple[dict, Cable]:  # type: ignore[type-arg]
    cables: list[Cable] = []

    def through(port: int) -> int:
        cables.append(Cable(port))
        return cables[0].port

    with streams(made, through) as link:
        facts = made.run(link)
    return facts["sites"], cables[0]


@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        (("method.name=ds-fl",), {"prediction": "up", "distillation": "down"}),
        (("method.name=fedid", "method.batch_size=1024"), {"interactive": "up"}),
        (("method.name=ds-fl", "exchange.predictions=float16"), {"prediction": "up", "distillation": "down"}),
    ],
)
def test_bytes_are_within_a_twentieth_of_the_formulas(
    federation: Make, small: Small, changes: tuple[str, ...], phases: dict[str, str]
) -> None:
    made = federation(small(*LARGE, *changes))
    sites, cable = counted(made)
    width = 2 if "float16" in changes[-1] else 4
    for site in sites.values():
        for phase, way in phases.items():
            assert site["formula"][phase][way] == width * 1024 * 2  # 4 N0 C
            assert site["formula"][phase][way] < site["bytes"][phase][way] < 1.05 * site["formula"][phase][way]
    # what the summary counts is what goes over the line, but for HTTP/2's frames and gRPC's pings
    up, down = (sum(site[f"bytes_{way}"] for site in sites.values()) for way in ("up", "down"))
    assert up < cable.up < 1.25 * up + 4000
    assert down < cable.down < 1.25 * down + 4000


def test_a_formula_has_only_phases_that_happened(federation: Make, small: Small) -> None:
    for weighted in (True, False):
        run = federation(small("rounds=1", "method.name=fedkd", f"method.class_weights={str(weighted).lower()}")).run()
        for site in run["sites"].values():
            assert set(site["formula"]) == ({"prediction", "class counts"} if weighted else {"prediction"})


def test_a_formula_does_not_count_what_stays_private(federation: Make, small: Small) -> None:
    run = federation(small("method.name=fedavg", "method.private=['classifier*']", "sites.south.model=tiny-bert")).run()
    assert all(site["formula"] == {} for site in run["sites"].values())


def test_rows_of_a_whole_pass_take_no_room(federation: Make, small: Small) -> None:
    made = federation(small(*LARGE, "method.name=ds-fl"))
    sites, _ = counted(made)
    assert all(site["bytes"]["prediction"]["down"] < 300 for site in sites.values())


@pytest.mark.parametrize(("encoding", "width", "error"), [("float16", 2, 1e-3), ("int8", 1, 2e-2)])
def test_predictions_in_fewer_bytes_both_ways(
    federation: Make, small: Small, encoding: str, width: int, error: float
) -> None:
    """The central model learns nearly the same from coded predictions, in as many bytes as the encoding says."""
    changes = (*LARGE, "data.public=256", "method.name=ds-fl", "method.era_input=logits")
    plain, coded = federation(small(*changes)), federation(small(*changes, f"exchange.predictions={encoding}"))
    seen: dict[Federation, list[np.ndarray]] = {plain: [], coded: []}
    for made in (plain, coded):
        honest = made.central.towards

        def towards(targets, loss, made=made, honest=honest):  # type: ignore[no-untyped-def]
            seen[made].append(targets)
            return honest(targets, loss)

        made.central.towards = towards  # type: ignore[method-assign]
    first, second = plain.run(), coded.run()
    wanted, found = seen[plain][0], seen[coded][0]
    assert wanted.shape == found.shape == (256, 2)
    assert 0 < np.abs(wanted - found).max() < 10 * error  # sharpened tenfold by the method
    for name, site in second["sites"].items():
        saved = first["sites"][name]["bytes"]["prediction"]["up"] - site["bytes"]["prediction"]["up"]
        assert saved == pytest.approx((4 - width) * 256 * 2, abs=60)
        back = first["sites"][name]["bytes"]["distillation"]["down"] - site["bytes"]["distillation"]["down"]
        assert back == pytest.approx((4 - width) * 256 * 2, abs=60)


def test_a_sites_next_state_takes_the_file_of_its_last_one(tmp_path: Path) -> None:
    """Whatever a stream holds between two exchanges keeps a file, and the next state then costs new pages."""

    def files() -> int:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(os.path.lexists(link) and os.readlink(link).startswith(str(tmp_path)) for link in links)

    exchange = Exchange("127.0.0.1:0", lambda facts: None, most_sites=1, spool=Spool(tmp_path, above=1000))
    door = Door(f"127.0.0.1:{exchange.port}", exchange.issue_token(1))
    session = Session(door, {"name": "echo"}, lambda ask: Reply("echo", ask.arrays))
    thread = threading.Thread(target=session.serve, daemon=True)
    thread.start()
    assert exchange.wait_for(1, 30)
    for number in range(4):
        state = {"x": np.full(200_000, float(number))}  # more than one message
        (reply,) = exchange.deliver({"echo": Ask("query.echo", state)}, 30)
        assert isinstance(reply, Reply)
        assert isinstance(reply.arrays, LazyState)
        assert np.array_equal(reply.arrays["x"], state["x"])
        del reply
        assert files() == 1
    exchange.close({})
    thread.join(10)
    assert not thread.is_alive()
