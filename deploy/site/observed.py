"""A site's numbers for Prometheus, from what it writes down anyway: its ledger and its budget."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import datetime

from fedstill.client.app import state_root
from fedstill.client.release.budget import Budget
from fedstill.common.config import SiteConfig
from fedstill.common.prometheus import Metric
from fedstill.strategies import all_verbs

OTHER = "other"  # verbs that are none: a coordinator could fill a Prometheus with their names


class SiteNumbers:
    """Reads the ledger as it grows; every call returns the numbers up to now."""

    def __init__(self, site: SiteConfig) -> None:
        self.site, self.folder = site, state_root(site)
        self._read, self._last, self._round = 0, 0.0, 0
        self._bytes: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._known = {*all_verbs(), "join", "approve"}
        self._refused: Counter[str] = Counter(dict.fromkeys((*self._known, OTHER), 0))  # 0, or the first is no increase

    def __call__(self) -> list[Metric]:
        """Return the site's numbers."""
        self._catch_up()
        found = [
            Metric("fedstill_site_round", "gauge", "Round of the last answer.", [({}, self._round)]),
            Metric("fedstill_site_answer_age_seconds", "gauge", "Seconds since the last answer.", self._age()),
            Metric("fedstill_site_bytes_total", "counter", "Bytes that left, by verb.", _by("verb", self._bytes)),
            Metric("fedstill_site_answers_total", "counter", "Answers that left, by verb.", _by("verb", self._answers)),
            Metric(
                "fedstill_site_refusals_total", "counter", "Asks and runs refused, by verb.", _by("verb", self._refused)
            ),
        ]
        privacy = self.site.privacy
        if privacy is not None:
            left = privacy.epsilon - Budget(self.folder, privacy.epsilon, privacy.delta).spent()
            found.append(
                Metric("fedstill_site_budget_left", "gauge", "Epsilon left of the privacy budget.", [({}, left)])
            )
        return found

    def _age(self) -> list[tuple[dict[str, str], float]]:
        return [({}, max(0.0, time.time() - self._last))] if self._last else []

    def _catch_up(self) -> None:
        path = self.folder / "ledger.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._read += len(raw)
                self._note(json.loads(raw))

    def _note(self, line: dict[str, object]) -> None:
        verb = str(line.get("verb"))
        verb = verb if verb in self._known else OTHER
        if "refused" in line:
            self._refused[verb] += 1
            return
        self._bytes[verb] += int(str(line.get("bytes") or 0))
        self._answers[verb] += 1
        self._last = datetime.fromisoformat(str(line["time"])).timestamp()
        self._round = int(str(line.get("round") or self._round))


def _by(label: str, counts: Counter[str]) -> list[tuple[dict[str, str], float]]:
    return [({label: name}, count) for name, count in sorted(counts.items())]
