"""FedDRS, FedAUX and FedKD of Wu et al. against their papers written out plainly, on real models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.client.node import Node
from fedstill.common import checkpoint
from fedstill.common.config import RunConfig
from fedstill.common.maths.svd import recompose
from fedstill.common.wire import Ask, Reply, size_of
from fedstill.strategies import find_method

from .conftest import Federation, spoil
from .test_baselines import QUICK, kl, privately, shares, stop, train
from .test_methods import flat

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
SAME = "sites.south.model=tiny-bert"
TINY = ("method.pseudo_texts=4", "method.pseudo_length=5", "method.sample_steps=3", "method.participation=1.0")
THREE = 'sites=[{name="a",model="tiny-bert"},{name="b",model="tiny-bert"},{name="c",model="tiny-bert"}]'
ONE_KIND = ("random_only", "target_only", "adversary_only")
WORDS = "bert.embeddings.word_embeddings.weight"


def overhear(node: Node) -> list[tuple[Ask, Reply]]:
    """What is asked of a site and what it answers."""
    heard: list[tuple[Ask, Reply]] = []
    spoil(node, lambda ask, reply: (heard.append((ask, reply)), reply)[1])
    return heard


def tensors(state: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in state.items()}


def mean_of(states: list[dict[str, np.ndarray]], weights: list[float]) -> dict[str, np.ndarray]:
    parts = {
        name: sum(w * s[name].astype(np.float64) for w, s in zip(weights, states, strict=True)) for name in states[0]
    }
    return {name: np.asarray(value, states[0][name].dtype) for name, value in parts.items()}


# --- FedDRS --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["mixed", "random_only", "target_only", "adversary_only", "post_only"])
def test_feddrs_is_the_plain_mean_corrected_by_every_model(federation: Make, small: Small, variant: str) -> None:
    changes = [
        *("method.name=feddrs", *QUICK, SAME, *TINY, "method.optimizer=adamw", "method.lambda=0.4", "seed=3"),
        *("method.samples=0", "method.balance=false", "method.local_epochs=1", "method.distill_steps=2"),
        *(f"method.variant={variant}", f"method.post_iterations={1 if variant == 'post_only' else 0}"),
    ]
    one, two = federation(small(*changes)), federation(small(*changes))
    one.run()
    student, states = two.central.learner, []
    for node in two.nodes:
        node.learner.load_weights(two.central.weights())
        optimizer = torch.optim.AdamW(node.learner.parameters, lr=1e-3, weight_decay=0.0)
        with node.learner.at(1, 0):
            rows = torch.randperm(len(node.private)).numpy()
            rows = rows[torch.randperm(len(rows)).numpy()]
            node.learner.model.train()
            for start in range(0, len(rows), 16):
                optimizer.zero_grad()
                batch = rows[start : start + 16]
                F.cross_entropy(node.learner.model(node.private.batch(batch)), node.labels[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        states.append(node.learner.weights())
    two.central.load_weights(mean_of(states, [0.5, 0.5]))
    before = two.central.weights()[WORDS]
    f_s = student.model.eval().net
    stage, made = "post" if variant == "post_only" else "round", []
    for node in two.nodes:
        f_k = node.learner.model.eval().net
        gamma = torch.bincount(node.labels, minlength=2).float()
        with student.at(1, stage, 0, node.name):
            for kind in (variant[:-5],) if variant in ONE_KIND else ("random", "target", "adversary"):
                labels = torch.multinomial(gamma, 4, replacement=True)
                theta = f_k.bert.embeddings.word_embeddings.weight[torch.randint(6000, (4, 5))].detach()
                for _ in range(0 if kind == "random" else 3):
                    for text in range(4):  # one sample at a time: nothing of a batch may matter
                        at = theta[text : text + 1].clone().requires_grad_()
                        loss = F.cross_entropy(f_k(inputs_embeds=at).logits, labels[text : text + 1])
                        if kind == "adversary":
                            loss = loss - 0.4 * F.cross_entropy(f_s(inputs_embeds=at).logits, labels[text : text + 1])
                        theta[text] -= 0.1 * torch.autograd.grad(loss, at)[0][0]
                made.append((theta, f_k(inputs_embeds=theta).logits.softmax(-1).detach()))
    rest = [p for n, p in student.model.named_parameters() if "word_embeddings" not in n]
    optimizer = torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.0)
    for _ in range(2):  # eq. 8: a sum over teachers of the mean over its pseudo texts
        optimizer.zero_grad()
        terms = [
            F.kl_div(f_s(inputs_embeds=theta).logits.log_softmax(-1), p, reduction="batchmean") for theta, p in made
        ]
        (2 * torch.stack(terms).mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert np.allclose(one.central.weights()[WORDS], before, atol=2e-6)  # a step would be 1e-3
    # AdamW's first steps are all but signs, and a sign near 0 is anybody's: nearly all weights, and their size
    off = (flat(one.central.learner) - flat(student)).abs()
    assert (off < 2e-5).float().mean() > 0.99
    assert off.max() < 5e-3


def test_no_site_trains_on_more_texts_than_the_smallest_has(federation: Make, small: Small) -> None:
    for changes, wanted in (((), "smallest"), (("method.samples=5",), 5), (("method.balance=false",), "all")):
        base = ("method.samples=0", "method.post_iterations=0", "method.variant=post_only", "method.local_epochs=1")
        made = federation(small("method.name=feddrs", *QUICK, SAME, *TINY, *base, *changes))
        heard = [overhear(node) for node in made.nodes]
        sizes = [len(node.private) for node in made.nodes]
        assert sizes[0] != sizes[1]
        made.run()
        used = [next(r.metrics["used"] for a, r in each if a.verb == "train.balanced") for each in heard]
        assert used == {"smallest": [min(sizes)] * 2, "all": sizes}.get(str(wanted), [wanted] * 2)
        gamma = [next(r.arrays["gamma"] for a, r in each if a.verb == "train.balanced") for each in heard]
        assert [g.tolist() for g in gamma] == [torch.bincount(n.labels, minlength=2).tolist() for n in made.nodes]


@pytest.mark.parametrize("name", ["feddf", "fedaux", "fedkd-mutual"])
def test_the_other_rows_of_feddrs_tables_have_its_local_training(federation: Make, small: Small, name: str) -> None:
    """Adafactor, and at most so many texts as the smallest site has: half the texts make half the steps."""
    preset = find_method(small(f"method.name={name}", "method.preset=feddrs").method)[1].model_dump()
    ours = find_method(small("method.name=feddrs").method)[1].model_dump()
    shared = ("optimizer", "optimizer_state", "samples", "balance", "participation")
    assert [preset[key] for key in shared] == [ours[key] for key in shared]
    made = federation(small(f"method.name={name}", "method.preset=feddrs", *QUICK, SAME, "method.participation=1.0"))
    sizes = [len(node.private) for node in made.nodes]
    assert sizes[0] != sizes[1]
    steps: dict[str, int] = {}
    for node in made.nodes:
        made_of, key = node.learner._make, node.name

        def counted(*arguments: Any, made_of: Any = made_of, key: str = key) -> Any:
            optimizer = made_of(*arguments)
            assert type(optimizer).__name__ == "Adafactor"
            step = optimizer.step

            def count(*more: Any) -> Any:
                steps[key] = steps.get(key, 0) + 1
                return step(*more)

            optimizer.step = count
            return optimizer

        node.learner._make = counted  # type: ignore[method-assign]
    made.run()
    batches = -(-min(sizes) // made.nodes[0].learner.batch_size)
    assert steps == {node.name: batches for node in made.nodes}  # one local epoch, as the small run has


def test_t5s_word_embeddings_are_averaged_once_and_then_stand_still(federation: Make, small: Small) -> None:
    t5 = ("central.model=tiny-t5", "sites.north.model=tiny-t5", "sites.south.model=tiny-t5", "report.evaluate=end")
    made = federation(small("method.name=feddrs", *QUICK, *t5, *TINY, "rounds=2", "method.local_epochs=1"))
    heard = [overhear(node) for node in made.nodes]
    before = made.central.weights()
    made.run()
    calls = [[(a, r) for a, r in each if a.verb == "train.balanced"] for each in heard]
    name, rest = "shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"
    first = [r.arrays[name] for (_, r), _ in calls]
    assert all(not np.array_equal(value, before[name]) for value in first)
    mean = np.asarray((first[0].astype(np.float64) + first[1]) / 2, np.float32)
    for _, (asked, reply) in calls:
        assert np.array_equal(asked.arrays[name], mean)  # averaged, not distilled, though the tied head has gradients
        assert np.array_equal(reply.arrays[name], mean)
        assert not np.array_equal(
            reply.arrays["encoder.final_layer_norm.weight"], before["encoder.final_layer_norm.weight"]
        )
    assert np.array_equal(made.central.weights()[name], mean)
    last = np.mean([pair[1][1].arrays[rest] for pair in calls], axis=0, dtype=np.float64)
    assert not np.allclose(made.central.weights()[rest], last, atol=1e-6)  # this part is distilled


def test_post_processing_is_over_every_model_that_was_ever_trained(federation: Make, small: Small) -> None:
    changes = ("method.participation=0.67", "rounds=2", "method.variant=post_only", "method.local_epochs=1", "seed=1")
    made = federation(small("method.name=feddrs", *QUICK, THREE, *TINY, *changes, "report.evaluate=end"))
    heard = {node.name: overhear(node) for node in made.nodes}
    made.run()
    took = {n: [a.settings["round"] for a, _ in each if a.verb == "train.balanced"] for n, each in heard.items()}
    late = [n for n, each in heard.items() if any(a.verb == "query.trained" for a, _ in each)]
    assert sorted(map(len, took.values())) == [1, 1, 2]
    assert late == [name for name, rounds in took.items() if rounds == [1]]
    assert made.events("round_finished")[1]["metrics"]["models"] == 3
    mean = np.mean([node.learner.weights()[WORDS].astype(np.float64) for node in made.nodes], axis=0)
    assert np.allclose(made.central.weights()[WORDS], mean, atol=1e-7)


def test_a_model_that_does_not_come_is_missing_from_post_processing_and_ends_no_run(
    federation: Make, small: Small
) -> None:
    changes = ("method.participation=0.67", "rounds=2", "method.variant=post_only", "method.local_epochs=1", "seed=1")
    made = federation(small("method.name=feddrs", *QUICK, THREE, *TINY, *changes, "exchange.quorum=0.5"))

    def keeps_it(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "query.trained":
            raise RuntimeError("not today")
        return reply

    for node in made.nodes:
        spoil(node, keeps_it)
    assert made.run()["status"] == "finished"
    assert made.events("left_out")
    assert made.events("round_finished")[1]["metrics"]["models"] == 2


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("feddrs", (*TINY, "method.participation=0.5", "method.optimizer_state=persistent", "method.local_epochs=1")),
        ("fedaux", ("method.preset=feddrs", "method.extractor=tiny-bert", "method.local_epochs=1")),
        ("fedkd-mutual", ("sites.south.model=tiny-roberta",)),
    ],
)
def test_a_run_that_is_cut_and_resumed_ends_the_same(federation: Make, small: Small, name: str, changes: Any) -> None:
    config = small(f"method.name={name}", *QUICK, "rounds=2", SAME, "report.evaluate=end", *changes)
    whole = federation(config)
    whole.run()
    cut = federation(config, "cut")
    stop(cut, number=2)
    with pytest.raises(RuntimeError, match="power cut"):
        cut.run()
    again = federation(config, "cut")
    again.run(resume=True)
    assert again.weights() == whole.weights()
    for node, other in zip(again.nodes, whole.nodes, strict=True):
        kept, wanted = checkpoint.flat(node.kept), checkpoint.flat(other.kept)
        assert kept.keys() == wanted.keys()
        assert all(np.array_equal(value, wanted[key]) for key, value in kept.items())


# --- FedAUX --------------------------------------------------------------------------------------------------------


def test_fedaux_weighs_each_text_by_who_knows_its_like(federation: Make, small: Small) -> None:
    from sklearn.linear_model import LogisticRegression

    changes = ("method.preset=feddrs", "method.extractor=minilm-2", "method.local_epochs=1", "method.participation=1.0")
    plain = ("method.optimizer=adamw", "method.optimizer_state=persistent", "method.samples=0", "method.balance=false")
    config = small("method.name=fedaux", *QUICK, SAME, *changes, *plain)
    one, two = federation(config), federation(config)
    heard = [overhear(node) for node in one.nodes]
    one.run()
    rows, negatives = one.method.rows, one.method.negatives  # type: ignore[attr-defined]
    assert len(negatives) == 8
    assert sorted([*rows, *negatives]) == list(range(40))
    scores = []
    for node in two.nodes:
        own, public = (vectors(list(texts.texts)) for texts in (node.texts.private, node.texts.public))
        norm = np.linalg.norm(np.concatenate([own, public[negatives]]), axis=1).max()
        count = len(own) + 8
        model = LogisticRegression(C=1 / (0.01 * count), max_iter=1000)
        model.fit(np.concatenate([own, public[negatives]]) / norm, [1] * len(own) + [0] * 8)
        scores.append(torch.from_numpy(model.predict_proba(public[rows] / norm)[:, 1]) + 1e-8)
    for each, wanted in zip(heard, scores, strict=True):
        [reply] = [r for a, r in each if a.verb == "query.scores"]
        assert np.allclose(reply.arrays["scores"], wanted, atol=1e-3)
        assert reply.arrays["scores"].nbytes == 4 * len(rows)
    for node in two.nodes:
        node.learner.load_weights(two.central.weights())
        privately(node, 1)
        node.learner.model.eval()
    with torch.no_grad():
        said = [node.learner.model(node.public.batch(rows)).double() for node in two.nodes]
    z = sum(s[:, None] * z for s, z in zip(scores, said, strict=True)) / sum(scores)[:, None]  # type: ignore[index]
    two.central.load_weights(mean_of([node.learner.weights() for node in two.nodes], shares(two)))
    y = z.softmax(-1).float()
    train(two.central.learner, (1, 2), two.central.public, rows, kl(y))
    assert torch.allclose(flat(one.central.learner), flat(two.central.learner), atol=1e-4)


def vectors(texts: list[str]) -> np.ndarray:
    """MiniLM's first two layers by the library alone: mean of the last hidden states, one text at a time."""
    from transformers import AutoModel, AutoTokenizer

    from fedstill.common.models.builtin import minilm_folder

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    model = AutoModel.from_pretrained(minilm_folder(), num_hidden_layers=2).eval()
    with torch.no_grad():
        return np.stack([
            model(**tokenizer(text, truncation=True, max_length=16, return_tensors="pt")).last_hidden_state[0].mean(0)
            for text in texts
        ])  # fmt: skip


def test_fedaux_asks_for_scores_once_and_noise_changes_them(federation: Make, small: Small) -> None:
    quick = ("rounds=2", SAME, "method.extractor=tiny-bert", "report.evaluate=end")
    found = []
    for preset in ("feddrs", "paper"):
        changes = ("method.participation=1.0", "method.local_epochs=1", f"method.preset={preset}")
        made = federation(small("method.name=fedaux", *QUICK, *quick, *changes))
        heard = overhear(made.nodes[0])
        made.run()
        asked = [(a, r) for a, r in heard if a.verb == "query.scores"]
        assert len(asked) == 1
        found.append(asked[0][1].arrays["scores"])
    assert np.ptp(found[0]) < 0.5
    assert set(np.round(found[1])) <= {0.0, 1.0}  # (0.1, 1e-5) on 40 texts: the noise is a hundred times the signal
    assert not np.allclose(found[0], found[1], atol=0.1)


# --- FedKD of Wu et al. --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["paper", "authors_code"])
def test_fedkd_mutual_trains_two_models_on_each_other(federation: Make, small: Small, preset: str) -> None:
    config = small("method.name=fedkd-mutual", *QUICK, "method.svd=false", f"method.preset={preset}")
    one, two = federation(config), federation(config)
    one.run()
    joint, changes = preset == "authors_code", []
    start = two.central.weights()
    for node in two.nodes:
        shared = two.central.learner.model
        shared.load_trainable_state(tensors(start))
        texts = shared.encode(node.texts.private.texts)
        both = (node.learner.model, shared)
        trained = [[p for n, p in m.named_parameters() if not (joint and "word_embeddings" in n)] for m in both]
        optimizers = [torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.0) for ps in trained]
        with node.learner.at(1, 0):
            order = torch.randperm(len(node.private)).numpy()
            both[0].train(), both[1].train()
            for at in range(0, len(order), 16):
                rows = order[at : at + 16]
                batches = (node.private.batch(rows), texts.batch(rows))
                outputs = [m.net(**b, output_hidden_states=True) for m, b in zip(both, batches, strict=True)]
                z = [output.logits for output in outputs]
                ce = [F.cross_entropy(logits, node.labels[rows]) for logits in z]
                losses = []
                for own, other in ((0, 1), (1, 0)):
                    free = (lambda t: t) if joint else (lambda t: t.detach())
                    p = free(z[other]).softmax(-1)
                    learn = (p * (p.log() - z[own].log_softmax(-1))).sum(-1).mean()
                    if node.name == "north":  # the same kind of model as the shared one
                        real = batches[0]["attention_mask"].bool()
                        pairs = zip(outputs[own].hidden_states, outputs[other].hidden_states, strict=True)
                        learn = learn + sum(((a - free(b))[real] ** 2).mean() for a, b in pairs) / 3
                    losses.append(ce[own] + learn / (ce[own] + free(ce[other])))
                for optimizer in optimizers:
                    optimizer.zero_grad()
                (losses[0] + losses[1]).backward()  # type: ignore[no-untyped-call]
                for optimizer in optimizers:
                    optimizer.step()
        after = two.central.weights()
        changes.append({name: after[name] - start[name] for name in start})
    mean = mean_of(changes, [0.5, 0.5])
    two.central.load_weights({name: start[name] + mean[name] for name in start})
    for learner, other in [(one.central.learner, two.central.learner)] + [
        (a.learner, b.learner) for a, b in zip(one.nodes, two.nodes, strict=True)
    ]:
        off = (flat(learner) - flat(other)).abs()
        assert (off < 2e-5).float().mean() > 0.99
        assert off.max() < 5e-3
    assert one.events("round_finished")[0]["metrics"]["hidden"] is False


def test_fedkd_mutual_sends_thin_factors_both_ways_and_all_hold_the_same(federation: Make, small: Small) -> None:
    size, ends = {}, {}
    for svd in (False, True):
        rounds = ("rounds=2", "report.evaluate=end", f"method.svd={'true' if svd else 'false'}", SAME)
        made = federation(small("method.name=fedkd-mutual", *QUICK, *rounds))
        heard = [overhear(node) for node in made.nodes]
        made.run()
        calls = [[(a, r) for a, r in each if a.verb.startswith("train")] for each in heard]
        assert [a.verb for a, _ in calls[0]] == ["train.mutual", "train.change"] * 2
        first, back, second, _ = calls[0]
        assert first[0].arrays
        assert not second[0].arrays  # it holds the shared model already
        size[svd] = size_of(first[1].arrays, {}), size_of(back[0].arrays, {})
        for node in made.nodes:
            kept = node.kept["shared"]["model"]
            assert all(np.array_equal(value, kept[name]) for name, value in made.central.weights().items())
            assert node.kept["shared"]["optimizer"]
        like = made.central.weights()
        ends[svd] = recompose(first[1].arrays, like), first[0].settings.get("share"), second[0].settings.get("share")
    whole, packed = ends[False][0], ends[True][0]
    assert size[False][0] == pytest.approx(sum(v.nbytes for v in whole.values()), rel=0.01)  # 4 P of the student
    assert size[True][0] < 0.75 * size[False][0]  # AdamW makes changes of nearly full rank
    assert size[True][1] < size[False][1]
    assert ends[False][1:] == (None, None)
    assert ends[True][1:] == pytest.approx((0.965, 0.98))
    for name, value in whole.items():
        energy = float((value.astype(np.float64) ** 2).sum())
        assert float(((packed[name] - value).astype(np.float64) ** 2).sum()) <= (1 - 0.965) * energy + 1e-9, name
    north = made.nodes[0].learner.model
    assert not torch.equal(flat(made.nodes[0].learner), flat(made.central.learner))  # the private model stays private
    assert north.family == "bert"


def test_a_change_that_does_not_fit_leaves_the_site_out(federation: Make, small: Small) -> None:
    made = federation(small("method.name=fedkd-mutual", *QUICK, "exchange.quorum=0.5"))

    def shorten(ask: Ask, reply: Reply) -> Reply:
        cut = {name: value[:-1] if name.endswith("|right") else value for name, value in reply.arrays.items()}
        return Reply(reply.node, cut, reply.metrics)

    spoil(made.nodes[1], shorten)
    made.run()
    [event] = made.events("left_out")
    assert event["site"] == "south"
    assert "do not fit the central model" in event["reason"]
