"""Loads and tries what a run will need, before anything is started: texts, models, method, ports, memory, disk."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from fedstill.client.own_task import make_node
from fedstill.common.config import ConfigError, LearnerConfig, RunConfig, SiteConfig
from fedstill.common.data.allocation import allocate, site_texts
from fedstill.common.models.builtin import quiet
from fedstill.common.models.text_model import ModelError
from fedstill.common.readable import size
from fedstill.deploy.launch import HERE
from fedstill.deploy.launch.checks import check_run
from fedstill.deploy.launch.forecast import Forecast, Trial, forecast, try_central, try_site
from fedstill.deploy.site.checks import CHECKPOINTS, Check, Failed
from fedstill.server.federation import Federation
from fedstill.server.tracking import check_packages
from fedstill.strategies import find_method

SHOWN = 12  # sites that a line names


class Examination:
    """Loads what a run will load, in this process, and keeps what its cost follows from."""

    def __init__(self, config: RunConfig, on: str, runs: Path) -> None:
        self.config, self.on, self.runs = config, on, runs
        self.here = config.sites if on in HERE else []  # elsewhere every site checks itself: flower-client --check
        self.began_with = psutil.Process().memory_info().rss
        self.texts: dict[str, int] = {}
        self.trials: dict[str, Trial] = {}
        self.central: Trial | None = None
        self.federation: Federation | None = None
        self.ok = True
        self._wrong: Exception | None = None  # the method's own objection

    def checks(self) -> Iterator[Check]:
        """Run every check; one that fails does not stop the others."""
        steps: list[tuple[str, Callable[[], str]]] = [
            ("settings", self._settings),
            ("data", self._data),
            ("central model", self._central),
            ("method", self._method),
            ("sites", self._sites),
            ("ports", self._ports),
            ("memory", self._memory),
            ("disk", self._disk),
        ]
        said: dict[str, str] = {}  # what was wrong, and the check that said so first
        with quiet(), _one_thread(self.on):
            for name, step in steps:
                try:
                    check = Check(name, True, step())
                except Failed as error:
                    check = Check(name, False, str(error), error.cure)
                except (ValueError, OSError, RuntimeError, MemoryError) as error:
                    check = Check(name, False, " ".join(str(error).split()) or type(error).__name__)
                if not check.ok and (first := said.setdefault(check.said, name)) != name:
                    check = Check(name, False, f"see {first}")
                self.ok = self.ok and check.ok
                yield check
                if name == "data" and not check.ok:
                    return  # nothing loads without texts

    def forecast(self) -> Forecast | None:
        """Return the run's cost; None if a check failed or the sites are elsewhere."""
        if not self.ok or self.federation is None or not self.trials:
            return None
        trials = {site.name: self.trials[_kind(site)] for site in self.here}
        return forecast(self.federation, self.on, self.texts, trials, self.central)

    def tried(self) -> list[tuple[str, Trial]]:
        """Return every model that was tried, with who uses it; the central one comes first."""
        central = [] if self.central is None else [("central", self.central)]
        using = {kind: [site.name for site in self.here if _kind(site) == kind] for kind in self.trials}
        return [*central, *((_listed(using[kind]), trial) for kind, trial in self.trials.items())]

    # --- the checks, in the order in which a person would look ---

    def _settings(self) -> str:
        check_run(self.config, self.on)
        if self.on in HERE:
            check_packages(self.config)
        where = "each on its own machine" if self.on not in HERE else f"--on {self.on}"
        return f"{self.config.expected_sites} sites, {where}; {self.config.rounds} rounds, seed {self.config.seed}"

    def _data(self) -> str:
        if self.config.mixed:
            return "every site has a task and texts of its own"
        held = allocate(self.config)
        splits = held.splits
        parts = {"private": splits.private, "public": splits.public, "labelled": splits.labelled, "test": splits.test}
        empty = [f"data.{name}" for name in ("test",) if not len(parts[name])]
        if empty:
            raise Failed(f"{empty[0]} leaves no texts to test on", f"set {empty[0]} above 0")
        counted = ", ".join(f"{len(texts):,} {name}" for name, texts in parts.items())
        return f"{self.config.task.name}: {counted}; labels {_listed(held.task.labels)}"

    def _central(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            try:
                self.federation = Federation(self.config, Path(folder))
            except ModelError:
                raise
            except ValueError as error:
                if isinstance(error, ConfigError) or not self._central_loads():
                    raise
                self._wrong = error
                return f"{self.config.central.model} loads"
        central = self.federation.central
        if not self.config.mixed:
            self.central = try_central(self.config.central.model, central)
            return _about(self.central)
        return f"{self.config.central.model} loads"

    def _central_loads(self) -> bool:
        from fedstill.server.central import make_central

        make_central(self.config)
        return True

    def _method(self) -> str:
        method, _ = find_method(self.config.method)
        if self._wrong is not None:
            raise self._wrong
        if self.federation is None:
            raise Failed("not tried while the central model does not load", "cure that first")
        if self.here:
            self.federation.sites = {site.name: {"model": Path(site.model).name} for site in self.here}
            with suppress(StopIteration):
                next(self.federation.method.check_sites(self.federation))
        return f"{method.name} ({method.paper}), preset {self.config.method.preset}"

    def _sites(self) -> str:
        if self.on not in HERE:
            return "elsewhere; each checks itself with: flower-client --site site.toml --check"
        said, wrong = [], []
        for site in self.here:
            try:
                said.append(self._site(site))
            except (ValueError, OSError, RuntimeError) as error:
                text = " ".join(str(error).split())
                wrong.append(text if text.startswith("site ") else f"site {site.name}: {text}")
        if wrong:
            raise Failed("; ".join(dict.fromkeys(wrong)), "")
        more = f", and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
        return "; ".join(said[:SHOWN]) + more

    def _site(self, site: SiteConfig) -> str:
        kind, labels = _kind(site), ""
        if kind not in self.trials:
            with tempfile.TemporaryDirectory() as folder:
                node = make_node(self.config, site, "check", Path(folder))
            self.texts[site.name] = len(node.private)
            self.trials[kind] = try_site(node)
        if not self.config.mixed:
            texts = site_texts(self.config, site)
            self.texts[site.name] = len(texts.private)
            counts = np.bincount(np.asarray(texts.private.labels), minlength=len(texts.task.labels))
            absent = [name for name, count in zip(texts.task.labels, counts, strict=True) if not count]
            labels = f", no {_listed(absent)}" if absent else ""
        elif site.name not in self.texts:
            with tempfile.TemporaryDirectory() as folder:
                self.texts[site.name] = len(make_node(self.config, site, "check", Path(folder)).private)
        return f"{site.name} {self.texts[site.name]:,} texts{labels}"

    def _ports(self) -> str:
        listen = self.config.exchange.listen
        host, _, port = listen.rpartition(":")
        if self.config.exchange.link == "messages" or port == "0":
            return "any free ones on loopback" if self.on in HERE else "the coordinator's"
        if self.on not in HERE:
            return f"{listen}, at the coordinator"
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host.strip("[]"), int(port)))
            except OSError as error:
                raise Failed(
                    f"exchange.listen = {listen!r} cannot be used ({error.strerror})",
                    'end what listens there, or take a free port: exchange.listen = "127.0.0.1:0"',
                ) from None
        return f"{listen} is free"

    def _memory(self) -> str:
        models = sum(_in_training(self.trials[_kind(site)]) for site in self.here if _kind(site) in self.trials)
        models += _in_training(self.central) if self.central else 0
        processes = len(self.here) + 1 if self.on in ("local", "simulation") else 0
        need, free = models + processes * self.began_with, psutil.virtual_memory().available
        if need > free:
            raise Failed(
                f"about {size(need)} are needed for {len(self.here)} sites and the server, and {size(free)} are free",
                "take smaller models, fewer sites, or [sites.lora]; --on process shares what processes have in common",
            )
        return f"about {size(need)} needed, {size(free)} free"

    def _disk(self) -> str:
        place = self.runs
        while not place.exists():
            place = place.parent
        tried = [self.trials[_kind(site)] for site in self.here if _kind(site) in self.trials]
        tried += [self.central] if self.central else []
        need, free = sum(3 * CHECKPOINTS * trial.bytes for trial in tried), shutil.disk_usage(place).free
        if need > free:
            raise Failed(f"{place}: {size(need)} are needed for checkpoints, and {size(free)} are free", "make room")
        return f"at most {size(need)} needed for checkpoints, {size(free)} free"


def examine(config: RunConfig, on: str, runs: Path) -> Forecast | None:
    """Refuse a run that cannot work, with every reason, before anything is started; return its cost."""
    examination = Examination(config, on, runs)
    failed = [check for check in examination.checks() if not check.ok]
    if failed:
        lines = [f"{each.name}: {each.said}" + (f"; {each.cure}" if each.cure else "") for each in failed]
        raise ConfigError("this run cannot work; nothing was started.\n" + "\n".join(f"  {line}" for line in lines))
    return examination.forecast()


def _kind(site: SiteConfig) -> str:
    """Name what two sites must have in common to take the same time."""
    return site.model_dump_json(include={*LearnerConfig.model_fields, "task"})


def _in_training(trial: Trial) -> int:
    """Return the bytes of a model with gradients and AdamW's two moments."""
    return round(trial.bytes * (1 + 3 * trial.trained / max(1, trial.parameters)))


def _about(trial: Trial) -> str:
    return f"{trial.model}: {trial.parameters:,} parameters"


def _listed(names: Any) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


@contextmanager
def _one_thread(on: str) -> Iterator[None]:
    """Measure with as many threads as a site will have; what a model's settings change is put back."""
    threads = torch.get_num_threads()
    if on in ("local", "simulation"):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
