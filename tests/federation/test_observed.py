"""The coordinator's numbers while a run goes on over real streams."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from fedstill.common.config import RunConfig
from fedstill.common.prometheus import text_of
from fedstill.common.wire import Ask, Reply
from fedstill.common.wire.frames import METHOD, grpc_options
from fedstill.server.observed import coordinator

from .conftest import Federation, spoil, streams

QUICK = ("report.alone=false", "report.centralized=false", "exchange.quorum=0.5", "method.name=ds-fl", "data.public=16")


def test_a_run_shows_its_round_its_sites_and_who_was_refused(
    federation: Callable[..., Federation], small: Callable[..., RunConfig]
) -> None:
    noise = "sites.north.privacy={epsilon = 50.0, noise_multiplier = 4.0}"
    made, seen = federation(small(*QUICK, noise)), list[str]()

    def look(ask: Ask, reply: Reply) -> Reply:
        if (ask.verb, ask.settings["round"]) == ("train.distil", 2):
            seen.append(text_of(coordinator(made.federation, link)))
        if (ask.verb, ask.settings["round"]) == ("train.local", 1):
            raise RuntimeError("not today")
        return reply

    spoil(made.nodes[1], look)
    with streams(made) as link:
        with grpc.insecure_channel(f"127.0.0.1:{link.exchange.port}", grpc_options(20)) as channel:
            assert channel.stream_stream(METHOD)(iter([])).code() is grpc.StatusCode.UNIMPLEMENTED
        made.run(link)
    [text] = seen
    for line in ("fedstill_round 2", "fedstill_rounds 2", "fedstill_sites 2", "fedstill_streams 2",
                 'fedstill_refusals_total{reason="unknown or spent token"} 1',
                 'fedstill_left_out_total{site="south"} 1',
                 'fedstill_bytes_total{site="north",way="up"} ', 'fedstill_budget_left{site="north"} ',
                 'fedstill_answer_age_seconds{site="south"} ', "fedstill_threads "):  # fmt: skip
        assert line in text, line
