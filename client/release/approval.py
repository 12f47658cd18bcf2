"""Sites say yes: a run is announced at the site before it starts, and only what was approved is answered.

The site itself works out the announcement from the run's configuration and the code that is installed here; the
coordinator has no say in it. An approval pins the hash of both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from fedstill.client.release.privacy import Guard
from fedstill.common.checkpoint import OWNER, OWNER_FOLDER, write_atomically
from fedstill.common.config import NAME, ApprovalConfig, PrivacyConfig, RunConfig, SiteConfig
from fedstill.common.data.tasks import TASKS
from fedstill.common.lock import taking_turns
from fedstill.common.maths.privacy import Use
from fedstill.common.wire import Facts
from fedstill.strategies import find_method
from fedstill.strategies import generic as generic_verbs
from fedstill.strategies.formulas import sizes_of
from fedstill.strategies.verbs import Verb

log = logging.getLogger("flwr")
POLL = 2.0  # seconds between two looks at the approvals


class NotApproved(RuntimeError):
    """This site has not approved the run; the text says how it is done."""


def verbs_of(config: RunConfig) -> dict[str, Verb]:
    """Return what the run's method can ask: the verbs of its file, its bases' and what these use, and every run's."""
    modules = {generic_verbs.__name__, *(kind.__module__ for kind in find_method(config.method)[0].__mro__)}
    homes = {getattr(value, "__module__", None) for name in modules for value in vars(sys.modules[name]).values()}
    modules |= {str(home) for home in homes if str(home).startswith("fedstill.strategies.")}  # such as ask_predictions
    found = [value for name in modules for value in vars(sys.modules[name]).values() if isinstance(value, Verb)]
    return {verb.name: verb for verb in sorted(found, key=lambda verb: verb.name)}


def announcement(config: RunConfig, run: str, site: SiteConfig, folder: Path) -> Facts:
    """Return what the run will ask of this site, and the hash that stands for it."""
    verbs = verbs_of(config)
    facts: Facts = {
        "run": run,
        "method": config.method.name,
        "parameters": config.method.parameters(),
        "rounds": config.rounds,
        "verbs": list(verbs),
        "leaves": sorted({kind for verb in verbs.values() for kind in verb.leaves}),
        **forecast(config, site),
        "most_mb": site.limits.mb_per_run,
        "public_texts": config.data.public,
        "code": code_hash(find_method(config.method)[0].__module__),
        "configuration": hashlib.sha256(config.to_json().encode()).hexdigest(),
    }
    if site.privacy is not None:
        facts["privacy"] = _budget(site.privacy, folder, facts.get("predictions"))
    pinned = {name: facts[name] for name in ("run", "code", "configuration")}
    return {**facts, "hash": hashlib.sha256(json.dumps(pinned, sort_keys=True).encode()).hexdigest()}


def forecast(config: RunConfig, site: SiteConfig) -> Facts:
    """Return how many predictions and megabytes of them the run will ask, by its method's arithmetic; empty if unknown.

    It is what the method needs; what a coordinator asks beyond that, the limits and the budget stop.
    """
    kind, parameters = find_method(config.method)
    labels = config.task.labels or (TASKS[config.task.name].labels if config.task.name in TASKS else None)
    public = config.data.public
    if (
        kind.formula is None or not labels or not isinstance(public, int) or not public
    ):  # a share: of what is not loaded
        return {}
    batch, width = site.batch_size or config.train.batch_size, config.exchange.predictions
    settings, classes = parameters.model_dump(), len(labels)
    sizes = sizes_of(settings, public=public, classes=classes, batch=batch, parameters=0, predictions=width)
    up = sum(up for phase, (up, _) in kind.formula(sizes).items() if phase in ("prediction", "interactive"))
    bytes_ = config.rounds * up
    return {"predictions": bytes_ // (sizes.width * sizes.classes), "mb": round(bytes_ / 1e6, 3)} if bytes_ else {}


def _budget(privacy: PrivacyConfig, folder: Path, predictions: int | None) -> Facts:
    """Return what is spent of the budget, what is left, and what the run's predictions would leave of it."""
    guard = Guard(privacy, folder)
    uses = guard.budget.uses()
    spent = guard.budget.spent(uses)
    facts = {"spent": round(spent, 4), "left": round(privacy.epsilon - spent, 4)}
    if predictions and not guard.trains:
        use = Use(guard.multiplier)
        after = guard.budget.spent({**uses, use: uses.get(use, 0) + predictions})
        facts["left_after"] = round(privacy.epsilon - after, 4)
    return facts


@cache
def code_hash(method: str) -> str:
    """Return the hash of the installed fedstill, and of the module that the method comes from."""
    import fedstill

    homes = [Path(place) for place in fedstill.__path__]
    digest = hashlib.sha256(Path(str(sys.modules[method].__file__)).read_bytes())
    rooms = ("client", "common", "deploy", "fedstill", "server", "strategies")
    for home in homes:
        for path in sorted(p for room in rooms for p in (home / room).rglob("*.py")):
            digest.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def why_not(rules: ApprovalConfig, told: Facts) -> list[str]:
    """Return what the site's rules have against a run; empty if they approve it."""
    reasons = []
    if told["method"] not in rules.methods:
        reasons.append(f"approval.methods has not {told['method']}")
    if rules.most_rounds is not None and told["rounds"] > rules.most_rounds:
        reasons.append(f"{told['rounds']} rounds, and approval.most_rounds is {rules.most_rounds}")
    if rules.most_mb is not None and (told["most_mb"] is None or told["most_mb"] > rules.most_mb):
        reasons.append(f"limits.mb_per_run lets {told['most_mb']} MB out, and approval.most_mb is {rules.most_mb:g}")
    budget = told.get("privacy", {})
    if rules.least_epsilon is not None and budget.get("left_after", budget.get("left", 0.0)) < rules.least_epsilon:
        reasons.append(f"less than approval.least_epsilon = {rules.least_epsilon:g} is left of the privacy budget")
    return reasons


class Approvals:
    """`runs/NAME.json` in a site's state folder: what was announced, and whether it was approved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs"

    def announce(self, told: Facts) -> None:
        """Write down a run that waits for an answer; one that was approved stays so if its hash is the same."""
        with self._turn(told["run"]) as path:
            if not path.exists() or json.loads(path.read_text()).get("hash") != told["hash"]:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                write_atomically(path, json.dumps({**told, "announced": now, "approved": None}, indent=1), OWNER)

    def approve(self, run: str, by: str, seen: str = "") -> Facts:
        """Approve the run as it was announced, with a hash that begins as `seen`; return the announcement."""
        with self._turn(run) as path:
            if not path.exists():
                known = ", ".join(sorted(one.stem for one in self.folder.glob("*.json"))) or "none"
                raise NotApproved(f"no run {run!r} was announced here; announced: {known}")
            told: Facts = json.loads(path.read_text())
            if not str(told["hash"]).startswith(seen):
                raise NotApproved(
                    f"run {run} was announced anew with another configuration ({told['hash'][:16]}): look at it again"
                )
            write_atomically(path, json.dumps({**told, "approved": by}, indent=1), OWNER)
            return told

    def approved(self, told: Facts) -> bool:
        """Return whether this very run, with this configuration and code, was approved."""
        path = self.folder / f"{told['run']}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        return bool(known.get("approved")) and known.get("hash") == told["hash"]

    def waiting(self) -> list[Facts]:
        """Return the runs that nobody has approved."""
        found = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]
        return [told for told in found if not told.get("approved")]

    @contextmanager
    def _turn(self, run: str) -> Iterator[Path]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=OWNER_FOLDER)
        with taking_turns(self.folder / "approvals.lock"):
            yield self.folder / f"{run}.json"


def require(
    config: RunConfig, run: str, site: SiteConfig, folder: Path, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Return once the site has approved the run; refuse it if its owner has not within `approval.wait` seconds."""
    if site.approval is None:
        return
    if len(run) > 128 or not re.fullmatch(NAME, run):
        raise NotApproved("the run's name is no name for a file")
    told, book = announcement(config, run, site, folder), Approvals(folder)
    book.announce(told)
    if book.approved(told):
        return
    against = why_not(site.approval, told)
    if not against:
        book.approve(run, "the rules in site.toml")
        return
    how = f"flower-client approve {run} {told['hash'][:16]} --site site.toml"
    log.warning("run %s waits for this site's yes (%s): %s", run, "; ".join(against), how)
    end = time.monotonic() + site.approval.wait
    while time.monotonic() < end:
        if book.approved(told):
            return
        sleep(POLL)
    raise NotApproved(f"site {site.name} has not approved run {run} ({told['hash'][:16]}); its owner can: {how}")
