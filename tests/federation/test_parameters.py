"""Methods that exchange parameters: each against its definition written out plainly, on real models."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.client.node import Node
from fedstill.common.config import ConfigError, RunConfig
from fedstill.common.states import LazyState
from fedstill.common.wire import Arrays, Ask, Reply
from fedstill.common.wire.spool import Spool
from fedstill.strategies import find_method
from fedstill.strategies.base import QuorumLost

from .conftest import Federation, precise, spoil, streams

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]

QUICK = ("rounds=1", "data.partition=dirichlet-clients", "report.alone=false", "report.centralized=false")
SAME = ("sites.south.model=tiny-bert",)


def more_sites(count: int) -> str:
    names = ("north", "south", "east", "west", "inner", "outer", "upper")[:count]
    return "sites=[" + ", ".join(f'{{name="{name}", model="tiny-bert"}}' for name in names) + "]"


@pytest.fixture
def make(federation: Make, small: Small) -> Callable[..., Federation]:
    return lambda name, *changes: federation(precise(small(f"method.name={name}", *QUICK, *SAME, *changes)))


def fit(node: Node, place: tuple[int, int], extra: Callable[[], Tensor] | None = None, times: int = 1) -> None:
    """One epoch of AdamW with CE and perhaps a term more, `times` over inside one place of the run."""
    with node.learner.at(*place):
        for _ in range(times):
            plain_epoch(node, extra)


def plain_epoch(node: Node, extra: Callable[[], Tensor] | None = None) -> None:
    optimizer = torch.optim.AdamW(node.learner.parameters, lr=1e-3, weight_decay=0.0)
    order = torch.randperm(len(node.private)).numpy()
    node.learner.model.train()
    for start in range(0, len(order), 16):
        places = order[start : start + 16]
        loss = F.cross_entropy(node.learner.model(node.private.batch(places)), node.labels[places])
        if extra is not None:
            loss = loss + extra()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def pull(node: Node, anchor: Arrays, strength: float) -> Callable[[], Tensor]:
    """strength/2 ||w - anchor||^2 over the anchor's parameters."""
    own = dict(node.learner.model.net.named_parameters())

    def term() -> Tensor:
        total = torch.zeros(())
        for name, value in anchor.items():
            if name in own:
                total = total + ((own[name] - torch.from_numpy(value.copy())) ** 2).sum()
        return strength / 2 * total

    return term


def mean(states: list[Arrays], sizes: list[int]) -> Arrays:
    shares = [size / sum(sizes) for size in sizes]
    return {
        name: sum(w * state[name].astype(np.float64) for w, state in zip(shares, states, strict=True))
        for name in states[0]
    }


def sizes_of(made: Federation) -> list[int]:
    sizes = [len(node.private) for node in made.nodes]
    assert sizes[0] != sizes[1]
    return sizes


def assert_state(found: Arrays, wanted: Arrays, atol: float = 1e-9) -> None:
    assert found.keys() >= wanted.keys()
    for name, value in wanted.items():
        if name.endswith("key.bias"):
            continue  # it does nothing to attention: its gradient is rounding noise, which Adam makes a step of
        far = np.abs(found[name] - value)
        assert far.max() <= atol, (name, far.max(), (far > atol).sum())


def answer_with(made: Federation, states: dict[str, Callable[[str, np.ndarray], np.ndarray]], texts: int = 8) -> None:
    """Sites that send hand-made parameters: theirs are a function of the name and of what the server holds."""
    began = made.central.weights()

    def change(node: Node) -> Callable[[Ask, Reply], Reply]:
        def changed(ask: Ask, reply: Reply) -> Reply:
            if ask.verb != "train.parameters":
                return reply
            arrays = {name: states[node.name](name, began[name]) for name in reply.arrays}
            return Reply(reply.node, arrays, {**reply.metrics, "texts": texts})

        return changed

    for node in made.nodes:
        spoil(node, change(node))
        _joins_with(node, texts)


def _joins_with(node: Node, texts: int) -> None:
    """A site says its size when it joins, and may not say another one later."""
    greeting = node.greeting()
    node.greeting = lambda: {**greeting, "texts": texts}  # type: ignore[method-assign]


def shifted(by: float) -> Callable[[str, np.ndarray], np.ndarray]:
    return lambda name, value: value + np.float32(by) if value.dtype.kind == "f" else value


# --- FedAvg, FedProx, FedBN, Ditto ---------------------------------------------------------------------------------


def test_fedavg_of_two_hand_made_models(make: Any) -> None:
    made = make("fedavg")
    began = made.central.weights()
    answer_with(made, {"north": lambda n, v: np.full_like(v, 2), "south": lambda n, v: np.full_like(v, 6)})
    honest = made.nodes[0].answer
    made.nodes[0].answer = lambda ask: _with_texts(honest(ask), 24)  # 24 texts at north, 8 at south
    _joins_with(made.nodes[0], 24)
    made.run()
    for name, value in made.central.weights().items():
        expected = (24 * 2 + 8 * 6) / 32 if began[name].dtype.kind == "f" else 2
        assert np.all(value == expected), name  # 3 exactly; counters come from the first site
    for node in made.nodes:  # the mean goes back, and is what sites test
        assert all(
            np.array_equal(value, made.central.weights()[name]) for name, value in node.learner.weights().items()
        )


def _with_texts(reply: Reply, texts: int) -> Reply:
    return Reply(
        reply.node, reply.arrays, {**reply.metrics, "texts": texts} if "texts" in reply.metrics else reply.metrics
    )


@pytest.mark.parametrize("name", ["fedprox", "fedbn"])
def test_fedprox_and_fedbn_by_their_definitions(make: Any, name: str) -> None:
    changes = ("rounds=2", "method.mu=0.5") if name == "fedprox" else ("rounds=2",)
    one, two = make(name, *changes), make(name, *changes)
    one.run()
    stays = "*LayerNorm*" if name == "fedbn" else "nothing"
    theta = two.central.weights()
    first_private = {n: v for n, v in theta.items() if fnmatchcase(n, stays)}
    for number in (1, 2):
        for node in two.nodes:
            own = {n: v for n, v in node.learner.weights().items() if fnmatchcase(n, stays)}
            node.learner.load_weights({**theta, **own})
            fit(node, (number, 0), pull(node, theta, 0.5) if name == "fedprox" else None)
        theta = mean([node.learner.weights() for node in two.nodes], sizes_of(two))
    theta.update(first_private)
    assert_state(one.central.weights(), theta)
    assert bool(first_private) == (name == "fedbn")
    for node, other in zip(one.nodes, two.nodes, strict=True):  # shared parts are the mean, norms are the site's own
        own = {n: v for n, v in other.learner.weights().items() if fnmatchcase(n, stays)}
        assert_state(node.learner.weights(), {**theta, **own})


def test_ditto_by_its_definition_and_v_is_what_is_tested(make: Any) -> None:
    changes = ("rounds=2", "method.lambda=0.7", "method.private=['classifier*']")
    one, two = make("ditto", *changes), make("ditto", *changes)
    one.run()
    theta = {n: v for n, v in two.central.weights().items() if not n.startswith("classifier")}
    v = [{**node.learner.weights(), **theta} for node in two.nodes]
    heads = [{n: a for n, a in node.learner.weights().items() if n.startswith("classifier")} for node in two.nodes]
    for number in (1, 2):
        sent = []
        for k, node in enumerate(two.nodes):
            with node.learner.at(number, 0):
                node.learner.load_weights({**theta, **heads[k]})  # the shared model, with its own private head
                plain_epoch(node)
                trained = node.learner.weights()
                sent.append({n: trained[n] for n in theta})
                heads[k] = {n: trained[n] for n in heads[k]}
                node.learner.load_weights(v[k])
                plain_epoch(node, pull(node, theta, 0.7))
                v[k] = node.learner.weights()
        theta = mean(sent, sizes_of(two))
    assert_state(one.central.weights(), theta)
    for node, expected in zip(one.nodes, v, strict=True):
        assert_state(node.learner.weights(), expected)
        difference = max(np.abs(expected[n] - theta[n]).max() for n in theta)
        assert difference > 1e-3  # v is no copy of the shared model
        row = [row for row in one.federation.results.history if row["node"] == node.name][-1]
        assert row["accuracy"] == node.test_scores()["accuracy"]


# --- several models at the server ----------------------------------------------------------------------------------


def test_fedavg_st_is_a_mean_within_each_group(make: Any) -> None:
    made = make("fedavg-st", more_sites(3), 'method.groups={a=["north", "east"], b=["south"]}')
    began = made.central.weights()
    answer_with(made, {"north": shifted(1), "south": shifted(5), "east": shifted(3)})
    made.run()
    models = {node.name: node.learner.weights() for node in made.nodes}
    for name, value in began.items():
        if value.dtype.kind == "f":
            assert np.allclose(models["north"][name], value + 2, atol=1e-5)
            assert np.array_equal(models["north"][name], models["east"][name])
            assert np.allclose(models["south"][name], value + 5, atol=1e-5)
            assert np.allclose(made.central.weights()[name], value + 3, atol=1e-5)  # the mean over the sites


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ("{}", "north is in no group"),
        ('{a=["north"]}', "south is in no group"),
        ('{a=["north", "south"], b=["south"]}', "south is in two groups"),
        ('{a=["north", "south", "mars"]}', "mars is no site of this run"),
    ],
)
def test_groups_that_do_not_fit_the_sites_are_refused(make: Any, groups: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"method.groups: .*{reason}"):
        make("fedavg-st", f"method.groups={groups}").run()


def along(direction: int, by: float) -> Callable[[str, np.ndarray], np.ndarray]:
    """A step in one of a few directions at right angles: another bias of the model each."""
    chosen = ("classifier.bias", "bert.pooler.dense.bias", "bert.embeddings.LayerNorm.bias")[direction]
    return lambda name, value: value + np.float32(by) if name == chosen else value


def planted(made: Federation) -> None:
    """North and east pull one way, south and west the other."""
    ways = {"north": 1.0, "east": 1.1, "south": -1.0, "west": -1.1}
    answer_with(made, {site: along(1, by) for site, by in ways.items()})


ABSOLUTE = ("method.lengths=absolute", "method.eps1=0.4", "method.eps2=1.6")


@pytest.mark.parametrize("apart", [True, False])
def test_percfl_splits_sites_whose_labels_contradict_each_other_and_no_others(
    federation: Make, small: Small, apart: bool
) -> None:
    """Real training of heads on trained encoders, with the thresholds that are the defaults."""
    frozen = 'model="small-bert", freeze="encoder"'
    sites = ", ".join(f'{{name="{name}", {frozen}}}' for name in ("north", "south", "east", "west"))
    changes = [*QUICK, f"sites=[{sites}]", "central.model=small-bert", "central.freeze=encoder", "method.name=percfl"]
    changes += ["data.private=800", "data.partition=iid", "rounds=3", "method.local_epochs=3", "train.max_length=32"]
    made = federation(small(*changes, "method.warmup_rounds=1"))
    for node in made.nodes[2:] if apart else ():
        node.labels = 1 - node.labels
    made.run()
    parts = [sorted(map(sorted, event["parts"])) for event in made.events("split")]
    assert parts == ([[["east", "west"], ["north", "south"]]] if apart else [])


def test_percfl_splits_two_planted_groups_when_it_is_time(make: Any) -> None:
    made = make("percfl", more_sites(4), "rounds=3", "method.warmup_rounds=1", *ABSOLUTE)
    began = made.central.weights()["bert.pooler.dense.bias"]
    planted(made)
    made.run()
    splits = made.events("split")
    assert [(e["round"], sorted(map(sorted, e["parts"]))) for e in splits] == [
        (2, [["east", "north"], ["south", "west"]])
    ]
    assert [e["metrics"]["clusters"] for e in made.events("round_finished")] == [1, 2, 2]
    told = [e["clusters"] for e in made.events("clusters")]
    assert [len(set(clusters.values())) for clusters in told] == [1, 2, 2]
    assert told[1]["north"] == told[1]["east"] != told[1]["south"] == told[1]["west"]
    models = {node.name: node.learner.weights()["bert.pooler.dense.bias"] for node in made.nodes}
    assert np.allclose(models["north"], began + 1.05, atol=1e-5)
    assert np.allclose(models["south"], began - 1.05, atol=1e-5)
    assert np.array_equal(models["north"], models["east"])
    assert np.array_equal(models["south"], models["west"])


@pytest.mark.parametrize("change", ["method.eps1=0.0001", "method.eps2=50.0", "method.warmup_rounds=3"])
def test_percfl_stays_together_otherwise(make: Any, change: str) -> None:
    made = make("percfl", more_sites(4), "method.warmup_rounds=0", *ABSOLUTE, change)
    ways = {"north": 1.0, "east": 1.0, "south": -1.0, "west": -0.99}  # the mean is short, but not shorter than 1e-4
    answer_with(made, {site: along(1, by) for site, by in ways.items()})
    made.run()
    assert made.events("split") == []


def test_spfl_by_hand(make: Any) -> None:
    made = make("spfl", more_sites(3))
    names = ("classifier.bias", "bert.pooler.dense.bias")
    began = {name: made.central.weights()[name] for name in names}

    def steps(*by: float) -> Callable[[str, np.ndarray], np.ndarray]:
        table = dict(zip(names, by, strict=True))
        return lambda name, value: value + np.float32(table.get(name, 0.0))

    # lengths: 2 numbers in the classifier's bias, 128 in the pooler's
    moves = {"north": (3.0, 0.0), "south": (3.0, 0.5), "east": (-3.0, 0.5)}
    answer_with(made, {site: steps(*by) for site, by in moves.items()})
    made.run()
    vectors = {site: np.concatenate([np.full(2, a), np.full(128, b)]) for site, (a, b) in moves.items()}
    for node in made.nodes:
        mine = vectors[node.name]
        cos = {s: max(0.0, mine @ v / np.sqrt((mine @ mine) * (v @ v))) for s, v in vectors.items()}
        a = {s: value / sum(cos.values()) for s, value in cos.items()}
        assert (a["east"] == 0.0) == (node.name == "north")  # east pulls away from north and leans towards south
        for place, name in enumerate(names):
            step = sum(a[site] * moves[site][place] for site in moves)
            assert np.allclose(node.learner.weights()[name], began[name] + step, atol=1e-5), (node.name, name)


# --- Flower's rules ------------------------------------------------------------------------------------------------


def lying(made: Federation) -> tuple[Arrays, dict[str, Arrays]]:
    """Seven sites, the last of which lies; what the server began with and what they send."""
    rng = np.random.default_rng(5)
    began = made.central.weights()
    sent = {
        node.name: {n: v + rng.normal(0, 0.1, v.shape).astype(v.dtype) for n, v in began.items() if v.dtype.kind == "f"}
        for node in made.nodes
    }
    sent[made.nodes[-1].name] = {n: v + np.float32(10) for n, v in sent[made.nodes[-1].name].items()}
    answer_with(made, {site: (lambda state: lambda name, value: state.get(name, value))(s) for site, s in sent.items()})
    return began, sent


@pytest.mark.parametrize("name", ["fedmedian", "fedtrimmedavg", "krum", "multikrum", "bulyan", "fedadam"])
def test_flowers_rules_against_numpy(make: Any, name: str) -> None:
    changes = ["method.num_nodes_to_select=3"] if name == "multikrum" else []
    made = make(name, more_sites(7), "data.private=140", *changes)
    began, sent = lying(made)
    made.run()
    stacked = {n: np.stack([state[n].astype(np.float64) for state in sent.values()]) for n in next(iter(sent.values()))}
    rows = np.concatenate([(v - began[n]).reshape(7, -1) for n, v in stacked.items()], axis=1)
    distances = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    scores = np.array([np.sort(np.delete(row, i))[: 7 - 1 - 2].sum() for i, row in enumerate(distances)])
    best = np.argsort(scores)
    for n, value in made.central.weights().items():
        if n not in stacked:
            continue
        everybody = stacked[n]
        if name == "fedmedian":
            expected = np.sort(everybody, axis=0)[3]
        elif name == "fedtrimmedavg":
            expected = np.sort(everybody, axis=0)[1:-1].mean(axis=0)  # a fifth of 7, rounded down, at each end
        elif name == "krum":
            expected = everybody[best[0]]
        elif name == "multikrum":
            expected = everybody[best[:3]].mean(axis=0)
        elif name == "bulyan":  # 7 - 2 sites are chosen, then of each number the 3 nearest to the median
            chosen = everybody[best[:5]]
            gaps = np.abs(chosen - np.median(chosen, axis=0))
            nearest = np.take_along_axis(chosen, np.argsort(gaps, axis=0, kind="stable")[:3], axis=0)
            expected = nearest.mean(axis=0)
        else:
            delta = everybody.mean(axis=0) - began[n]
            m, v = 0.1 * delta, 0.01 * delta**2
            rate = 0.1 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2)  # Flower counts the first round as its second step
            expected = began[n] + rate * m / (np.sqrt(v) + 1e-3)
        assert np.allclose(value, expected, atol=1e-4), n
    if name in ("fedmedian", "fedtrimmedavg", "krum", "multikrum", "bulyan"):  # the liar moved nothing far
        assert max(np.abs(v - began[n]).max() for n, v in made.central.weights().items()) < 1


def test_too_few_sites_for_a_rule_are_refused_at_the_start(make: Any) -> None:
    with pytest.raises(ValueError, match=r"bulyan with method.num_malicious_nodes = 1 needs 7 sites in a round and 2"):
        make("bulyan").run()


# --- private parts, mismatches, adapters ---------------------------------------------------------------------------


def test_private_parts_never_travel(make: Any) -> None:
    made = make("fedavg", "method.private=['classifier*', '*embeddings*']")
    seen: list[tuple[str, str]] = []

    def note(ask: Ask, reply: Reply) -> Reply:
        seen.extend([("down", name) for name in ask.arrays] + [("up", name) for name in reply.arrays])
        return reply

    for node in made.nodes:
        spoil(node, note)
    own = [node.learner.weights()["classifier.weight"] for node in made.nodes]
    began = made.central.weights()["classifier.weight"]
    made.run()
    assert {way for way, _ in seen} == {"up", "down"}
    assert not [name for _, name in seen if name.startswith("classifier") or "embeddings" in name]
    assert np.array_equal(made.central.weights()["classifier.weight"], began)
    after = [node.learner.weights()["classifier.weight"] for node in made.nodes]
    assert not np.array_equal(after[0], after[1])
    assert not np.array_equal(after[0], own[0])  # private, and trained


def test_patterns_that_match_nothing_or_everything_are_refused_with_the_names(make: Any) -> None:
    with pytest.raises(ValueError, match=r"'\*Nrom\*' matches no parameter .*bert.embeddings.LayerNorm.weight"):
        make("fedavg", "method.private=['*Nrom*']").run()
    with pytest.raises(ValueError, match="leave nothing to share"):
        make("fedavg", "method.private=['*']").run()


def test_shapes_that_differ_are_refused_before_anything_is_trained_with_the_list(make: Any) -> None:
    lora = ("central.lora={r=4}", "sites.north.lora={r=4}", "sites.south.lora={r=2}")
    with pytest.raises(
        ValueError, match=r"site south .* different parameters: .*lora_A.* has shape \(2, 128\) instead"
    ):
        make("fedavg", *lora).run()
    with pytest.raises(ValueError, match=r"site north .*lora_A.*is missing.*is not part of this model"):
        make("fedavg", "central.lora={r=4}").run()


def test_other_weights_under_the_adapters_are_refused(make: Any) -> None:
    made = make("fedavg", "central.lora={r=4}", "sites.north.lora={r=4}", "sites.south.lora={r=4}")
    with torch.no_grad():
        next(p for p in made.nodes[1].learner.model.parameters() if not p.requires_grad).add_(1e-3)
    with pytest.raises(ValueError, match="site south has other weights under its adapters"):
        made.run()


def test_a_site_that_sends_another_shape_is_left_out_with_the_list(make: Any) -> None:
    made = make("fedavg")

    def cut_off(ask: Ask, reply: Reply) -> Reply:
        arrays = dict(reply.arrays)
        if ask.verb == "train.parameters":
            arrays["classifier.bias"] = arrays["classifier.bias"][:1]
            arrays["extra"] = arrays.pop("classifier.weight")
        return Reply(reply.node, arrays, reply.metrics)

    spoil(made.nodes[1], cut_off)
    with pytest.raises(QuorumLost):
        made.run()
    reason = made.events("left_out")[0]["reason"]
    assert "classifier.weight is missing; extra is not part of this model; classifier.bias has shape (1,)" in reason


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto", "spfl", "percfl", "fedadam", "fedmedian"])
def test_on_adapters_only_adapters_and_head_travel(make: Any, name: str) -> None:
    lora = ("central.lora={r=4}", "sites.north.lora={r=4}", "sites.south.lora={r=4}")
    made = make(name, *lora)
    travelling = made.central.weights()
    assert all("lora_" in key or "classifier" in key for key in travelling)
    size = sum(value.nbytes for value in travelling.values())
    made.run()
    summary = made.federation.costs.site("north")
    whole = sum(p.numel() * 4 for p in made.nodes[0].learner.model.parameters())
    assert size < summary["bytes_up"] < 1.2 * size + 10_000  # one state, and the names
    assert summary["bytes_up"] < 0.05 * whole
    times = 1 if name == "ditto" else 2  # the model goes down, and its successor
    assert times * size < summary["bytes_down"] < times * (1.2 * size + 10_000)
    base = {n: p for n, p in made.nodes[0].learner.model.named_parameters() if not p.requires_grad}
    fresh = {n: p for n, p in make(name, *lora).nodes[0].learner.model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(base[n], fresh[n]) for n in base)


def test_fedbn_on_adapters_is_refused_since_no_norm_travels(make: Any) -> None:
    lora = ("central.lora={r=4}", "sites.north.lora={r=4}", "sites.south.lora={r=4}")
    with pytest.raises(ValueError, match=r"'\*\[Nn\]orm\*' matches no parameter"):
        make("fedbn", *lora).run()


# --- on the stream, on disk, and resumed ---------------------------------------------------------------------------


def test_a_model_that_waited_on_disk_gives_the_same_bits(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    local, spooled = make("fedavg", "rounds=2"), make("fedavg", "rounds=2")
    local.run()
    kinds: list[type] = []
    monkeypatch.setattr("fedstill.server.exchange.Spool", partial(Spool, above=0))
    with streams(spooled) as link:
        deliver = link.deliver

        def noting(parts: dict[str, Ask], deadline: float) -> Any:
            for outcome in deliver(parts, deadline):
                if isinstance(outcome, Reply) and outcome.arrays:
                    kinds.append(isinstance(outcome.arrays, LazyState))
                yield outcome

        link.deliver = noting
        spooled.run(link)
    assert kinds == [True] * 4
    assert spooled.weights() == local.weights()


@pytest.mark.parametrize("name", ["fedadam", "percfl", "ditto", "spfl"])
def test_resumed_in_the_middle_gives_the_same_bits(federation: Make, small: Small, name: str) -> None:
    changes = [f"method.name={name}", *QUICK, *SAME, "method.participation=0.7"]
    if name == "percfl":
        changes += [
            more_sites(4),
            "method.warmup_rounds=0",
            "method.lengths=absolute",
            "method.eps1=10.0",
            "method.eps2=0.0001",
            "data.private=80",
        ]
    if name == "ditto":
        changes += ["method.private=['classifier*']"]
    straight = federation(small(*changes, "rounds=3"))
    straight.run()
    federation(small(*changes, "rounds=2"), "same").run()
    resumed = federation(small(*changes, "rounds=3"), "same")
    resumed.run(resume=True)
    assert resumed.weights() == straight.weights()
    if name == "percfl":
        assert straight.events("split")
        assert resumed.method.clusters == straight.method.clusters  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("ditto", {"optimizer_state": "persistent"}, "optimizer_state"),
        ("fedprox", {"mu": 0.0}, "mu"),
        ("fedtrimmedavg", {"beta": 0.5}, "beta"),
        ("fedavg", {"mu": 0.1}, "mu: unknown key"),
    ],
)
def test_settings_that_make_no_sense_are_refused(small: Small, name: str, settings: Any, reason: str) -> None:
    config = small(f"method.name={name}").method
    with pytest.raises(ConfigError, match=reason):
        find_method(config.model_copy(update=settings))
