"""One long run under everything that goes wrong in months: kills, cuts, slow sites, a lost coordinator, hostile frames.

    python experiments/bench/soak.py [--rounds 2000] [--seed 1] [--minutes 60]

Three honest sites of tiny models, each behind a TCP line of its own, DS-FL over real streams in one process. In every
round something may happen: a line is pulled, a site is killed and begins anew from its state folder, a site is too slow
for the deadline, strangers send nonsense, or the coordinator itself dies and resumes. At the end it must hold: no
finished round was lost, memory and threads are flat, and every honest site took part in the last rounds. Figures are
written to experiments/bench/soak.json; the exit code is 1 if anything does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tests' line and link serve here as well

import grpc  # noqa: E402
import psutil  # noqa: E402

from fedstill.client.own_task import make_node  # noqa: E402
from fedstill.client.session import Door, Session, SessionLost, SessionRefused  # noqa: E402
from fedstill.common.config.files import load_run  # noqa: E402
from fedstill.common.wire import Ask, Failure, Reply  # noqa: E402
from fedstill.common.wire.frames import METHOD, TOKEN, grpc_options  # noqa: E402
from fedstill.server.exchange import Exchange  # noqa: E402
from fedstill.server.federation import Federation  # noqa: E402
from fedstill.server.record import Record  # noqa: E402
from fedstill.strategies.base import QuorumLost  # noqa: E402
from tests.conftest import SMALL  # noqa: E402
from tests.federation.cable import Cable  # noqa: E402
from tests.federation.conftest import ExchangeLink  # noqa: E402

RESULTS = Path(__file__).with_name("soak.json")
CALM = 5  # rounds at the end in which nothing happens any more
DEADLINE = 3.0  # seconds for an answer
CHANGES = ["report.alone=false", "report.centralized=false", "report.evaluate=end", "method.name=ds-fl",
           "method.distill_epochs=1", "data.public=8", "data.private=48", "data.test=8", "train.max_length=8",
           "sites.south.model=tiny-bert", "exchange.quorum=0.3", f"exchange.train_deadline={DEADLINE}",
           f"exchange.step_deadline={DEADLINE}"]  # fmt: skip
CHANCES = {"cut": 0.06, "kill": 0.03, "slow": 0.01, "strangers": 0.05, "coordinator": 0.01}  # in a round


class Killed(BaseException):
    """Ends a site's session, or the coordinator's run, as the end of its process would."""


class Site:
    """An honest site: its node, its line to the coordinator, and what is about to happen to it."""

    def __init__(self, config: Any, number: int, folder: Path) -> None:
        self.config, self.number, self.folder = config, number, folder / config.sites[number].name
        self.name, self.fate, self.thread = config.sites[number].name, "", threading.Thread()
        self.cable: Cable | None = None

    def begin(self, exchange: Exchange) -> None:
        """Begin anew from the state folder, as a restarted process does."""
        if self.cable is not None:
            with contextlib.suppress(OSError):
                self.cable.listener.shutdown(socket.SHUT_RDWR)  # a plain close leaves its thread waiting
            self.cable.listener.close()
            self.cable.pull()
            gc.collect()  # a process that ends leaves nothing; its model is part of a cycle
        self.cable, self.fate = Cable(exchange.port), ""
        node = make_node(self.config, self.config.sites[self.number], "run", self.folder)
        door = Door(f"127.0.0.1:{self.cable.port}", exchange.issue_token(self.number), patience=20)

        def answer(ask: Ask) -> Reply:
            fate, self.fate = self.fate, ""
            if fate == "kill":
                raise Killed
            if fate == "slow":
                time.sleep(DEADLINE + 1)
            return node.answer(ask)

        session = Session(door, node.greeting(), answer)

        def serve() -> None:
            with contextlib.suppress(Killed, SessionLost, SessionRefused):
                session.serve()

        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()


class Chaos(ExchangeLink):
    """The link, with something that may go wrong at the first Ask of each round."""

    def __init__(self, exchange: Exchange, sites: list[Site], chance: random.Random, last: int) -> None:
        super().__init__(exchange, [site.name for site in sites])
        self.honest, self.chance, self.last, self.seen = sites, chance, last, 0
        self.happened: Counter[str] = Counter()

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        number = int(next(iter(parts.values())).settings.get("round", 0)) if parts else self.seen
        if number > self.seen:
            self.seen = number
            if number <= self.last - CALM:
                self._disturb()
        yield from super().deliver(parts, deadline)

    def returned(self) -> dict[str, Any]:
        for site in self.honest:
            if not site.thread.is_alive():
                site.begin(self.exchange)
        if self.seen >= self.last - CALM:  # let everybody come back before the last rounds
            end = time.monotonic() + 10
            while self.exchange.open_streams() < len(self.honest) and time.monotonic() < end:
                time.sleep(0.02)
        return super().returned()

    def _disturb(self) -> None:
        for kind, chance in CHANCES.items():
            if self.chance.random() > chance:
                continue
            self.happened[kind] += 1
            site = self.chance.choice(self.honest)
            if kind == "cut" and site.cable is not None:
                threading.Timer(self.chance.random() * 0.2, site.cable.pull).start()
            elif kind in ("kill", "slow"):
                site.fate = kind
            elif kind == "strangers":
                self._strangers()
            elif kind == "coordinator":
                raise Killed

    def _strangers(self) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self.exchange.port}", grpc_options(20)) as channel:
            for token in ("", "guess", self.exchange.issue_token(999)):
                rubbish = [self.chance.randbytes(self.chance.randrange(200)) for _ in range(3)]
                with contextlib.suppress(grpc.RpcError):
                    list(channel.stream_stream(METHOD)(iter(rubbish), metadata=((TOKEN, token),), timeout=5))


def run(rounds: int, seed: int, minutes: float, folder: Path) -> dict[str, Any]:
    """Run to the end through everything; return what happened and what was measured."""
    more = '[[sites]]\nname = "west"\nmodel = "tiny-bert"\n[exchange]'
    config = load_run(SMALL.replace("[exchange]", more), [*CHANGES, f"rounds={rounds}"])
    chance, process, happened = random.Random(seed), psutil.Process(), Counter[str]()
    sites = [Site(config, number, folder / "sites") for number in range(3)]
    samples: list[tuple[int, int, int]] = []  # round, bytes of memory, threads
    began, resume, ended = time.monotonic(), False, False

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "round_finished" and event["round"] % max(1, rounds // 50) == 0:
            samples.append((event["round"], process.memory_info().rss, threading.active_count()))

    while not ended:
        record = Record(folder / "run", config, watch)
        federation = Federation(config, record)
        exchange = Exchange("127.0.0.1:0", federation.admission(), patience=1.0, most_sites=3, keep_alive=5)
        for site in sites:
            site.begin(exchange)
        if not exchange.wait_for(len(sites), 60):
            raise SystemExit("the sites did not come back")
        link = Chaos(exchange, sites, chance, rounds)
        try:
            federation.run(link, resume)
            ended = True
        except Killed:
            resume = True
        except QuorumLost as error:
            happened["quorum lost"] += 1
            print(error, flush=True)
            resume = True
        finally:
            happened.update(link.happened)
            link.close({"status": "finished" if ended else "failed"})
            for site in sites:
                site.thread.join(30)
        if time.monotonic() - began > 60 * minutes:
            break
    return {"ended": ended, "happened": dict(happened), "seconds": round(time.monotonic() - began),
            "samples": samples, **judged(folder / "run/events.jsonl", rounds, samples)}  # fmt: skip


def judged(path: Path, rounds: int, samples: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Return whether everything holds that must."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    lost, saved, finished = 0, 0, set[int]()
    for event in events:
        if event["event"] == "checkpoint":
            saved = max(saved, event["round"])
        elif event["event"] == "resumed" and event["round"] != saved:
            lost += saved - (event["round"] or 0)
        elif event["event"] == "round_finished":
            finished.add(event["round"])
    calm = [e for e in events if e["event"] == "left_out" and e["round"] > rounds - CALM + 1]
    early = [sample for sample in samples if sample[0] >= rounds / 5][:3] or samples[:1]
    late = samples[-3:]
    grown = max(s[1] for s in late) - max(s[1] for s in early) if late else 0
    return {
        "rounds": len(finished),
        "lost_rounds": lost,
        "left_out": sum(event["event"] == "left_out" for event in events),
        "readmitted": sum(event["event"] == "readmitted" for event in events),
        "left_out_at_the_end": len(calm),
        "memory_grown_mb": round(grown / 1e6, 1),
        "threads": [min(s[2] for s in samples), max(s[2] for s in late)] if samples else [],
        "holds": len(finished) == rounds and lost == 0 and not calm and grown < 100e6
        and (not samples or max(s[2] for s in late) <= max(s[2] for s in early) + 20),
    }  # fmt: skip


def main() -> None:
    """Soak, print, write."""
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=120.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(options.rounds, options.seed, options.minutes, Path(folder))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print({name: value for name, value in found.items() if name != "samples"})
    sys.exit(0 if found["holds"] and found["ended"] else 1)


if __name__ == "__main__":
    main()
