"""The coordinator's numbers for Prometheus: rounds, sites, streams, threads, refusals, bytes, budgets, ages."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from fedstill.common.prometheus import Metric

if TYPE_CHECKING:
    from fedstill.server.federation import Federation
    from fedstill.server.link import Link


def coordinator(fed: Federation, link: Link) -> list[Metric]:
    """Return what a person watches while a run goes on."""
    traffic, sites = link.traffic(), link.sites
    found = [
        Metric("fedstill_round", "gauge", "Number of the round.", [({}, fed.number)]),
        Metric("fedstill_rounds", "gauge", "Rounds of the run.", [({}, fed.config.rounds)]),
        Metric("fedstill_sites", "gauge", "Sites of the run.", [({}, len(sites))]),
        Metric("fedstill_sites_away", "gauge", "Sites that are late or lost.", [({}, len(fed.away))]),
        Metric("fedstill_threads", "gauge", "Threads of the coordinator's process.", [({}, threading.active_count())]),
        Metric(
            "fedstill_bytes_total",
            "counter",
            "Bytes of each site, up to the coordinator and down from it.",
            [
                ({"site": s, "way": w}, n)
                for s, both in traffic.items()
                for w, n in zip(("up", "down"), both, strict=True)
            ],
        ),
        Metric(
            "fedstill_left_out_total",
            "counter",
            "Answers that were missing or unusable.",
            [({"site": site}, fed.left_out[site]) for site in sites],  # from 0 on, or the first would be no increase
        ),
        Metric(
            "fedstill_budget_left",
            "gauge",
            "Epsilon that is left of a site's privacy budget, as it says.",
            [({"site": site}, float(told["left"])) for site, told in fed.results.privacy.items() if "left" in told],
        ),
        Metric(
            "fedstill_answer_age_seconds",
            "gauge",
            "Seconds since a site's last usable answer.",
            [({"site": site}, time.monotonic() - at) for site, at in fed.heard_at.items()],
        ),
    ]
    exchange = getattr(link, "exchange", None)
    if exchange is not None:
        found += [
            Metric("fedstill_streams", "gauge", "Open streams of sites.", [({}, exchange.open_streams())]),
            Metric(
                "fedstill_refusals_total",
                "counter",
                "Connections and sites that were not let in, by reason.",
                [({"reason": reason}, count) for reason, count in exchange.refusals.items()],
            ),
        ]
    return found
