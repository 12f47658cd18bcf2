"""FedDRS's pseudo texts: losses by hand (eqs. 6 to 8), gradients by finite differences, samples by what they do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstill.common.config import ModelConfig
from fedstill.common.config.files import load_run
from fedstill.common.data.tasks import TASKS
from fedstill.common.maths import pseudo
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import ModelError, TextModel
from fedstill.strategies.feddrs.sampler import Sampler, Sampling

TASK = TASKS["film-reviews"]


def model(name: str = "tiny-bert", seed: int = 1, **more: object) -> TextModel:
    return load_model(ModelConfig.model_validate({"name": name, **more}), TASK, seed).eval()


@pytest.fixture(scope="module")
def two() -> tuple[TextModel, TextModel]:
    """A teacher and a student that differ in their heads."""
    return model(seed=1), model(seed=2)


def said(made: TextModel, theta: Tensor) -> list[list[float]]:
    """Probabilities of each pseudo text, one at a time, through the library's own argument."""
    found = []
    for text in theta:
        with torch.no_grad():
            logits = made.net(inputs_embeds=text[None]).logits[0].tolist()
        powers = [math.exp(value) for value in logits]
        found.append([power / sum(powers) for power in powers])
    return found


def test_losses_are_equations_6_to_8_written_out(two: tuple[TextModel, TextModel]) -> None:
    teacher, student = two
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theta = pseudo.draw_rows(teacher.embed, teacher.embedding.num_embeddings, 4, 6)
    labels = torch.tensor([0, 1, 1, 0])
    p, q = said(teacher, theta), said(student, theta)
    ce_teacher = sum(-math.log(p[i][c]) for i, c in enumerate(labels.tolist())) / 4
    ce_student = sum(-math.log(q[i][c]) for i, c in enumerate(labels.tolist())) / 4
    kl = sum(p[i][c] * math.log(p[i][c] / q[i][c]) for i in range(4) for c in range(2)) / 4
    f_k, f_s = teacher.from_embeddings, student.from_embeddings
    assert float(pseudo.target_loss(f_k, theta, labels).detach()) == pytest.approx(ce_teacher, abs=1e-5)
    adversary = pseudo.adversary_loss(f_k, f_s, theta, labels, 0.3)
    assert float(adversary.detach()) == pytest.approx(ce_teacher - 0.3 * ce_student, abs=1e-5)
    other = pseudo.adversary_loss_kl(f_k, f_s, theta, labels, 0.3)
    assert float(other.detach()) == pytest.approx(ce_teacher - 0.3 * kl, abs=1e-5)
    told = pseudo.teacher_says(f_k, theta, labels)
    assert float(pseudo.pseudo_distillation(f_s, theta, labels, told).detach()) == pytest.approx(kl, abs=1e-5)


def test_an_update_is_a_plain_gradient_step_of_each_sample(two: tuple[TextModel, TextModel]) -> None:
    teacher, student = (made.double() for made in map(model, ("tiny-bert", "tiny-bert"), (1, 2)))
    table = teacher.embedding.weight.detach()
    theta, labels = torch.stack([table[10:13], table[40:43], table[70:73]]), torch.tensor([1, 0, 1])

    def f(made: TextModel, at: Tensor, label: Tensor) -> Tensor:
        return made.net(inputs_embeds=at[None]).logits.log_softmax(-1)[0, label]

    def own(at: Tensor, label: Tensor) -> float:
        with torch.no_grad():
            return float(-f(teacher, at, label) + 0.5 * f(student, at, label))

    answers = [lambda t, y, m=made: (m.net(inputs_embeds=t).logits, y) for made in (teacher, student)]
    moved = pseudo.improve(theta, lambda at: pseudo.adversary_loss(*answers, at, labels, 0.5), 0.1, 1)
    step, h = (theta - moved) / 0.1, 1e-6
    for text, token, place in [(0, 0, 5), (1, 2, 100), (2, 1, 64)]:
        up, down = theta[text].clone(), theta[text].clone()
        up[token, place] += h
        down[token, place] -= h
        slope = (own(up, labels[text]) - own(down, labels[text])) / (2 * h)
        assert float(step[text, token, place]) == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_adversary_samples_are_right_for_the_teacher_and_worse_for_the_student(
    two: tuple[TextModel, TextModel],
) -> None:
    teacher, student = two
    sampler = Sampler(student, Sampling(16, 12, "rows", 60, 0.1))
    sampler.load({name: value.numpy() for name, value in teacher.trainable_state().items()})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        start = sampler.sample("random", np.array([5, 5]), 0.1)
        target = sampler.sample("target", np.array([5, 5]), 0.1)
        adversary = sampler.sample("adversary", np.array([5, 5]), 0.1)

    def ce(made: TextModel, texts: object) -> float:
        return float(pseudo.target_loss(made.from_embeddings, texts.theta, texts.labels).detach())  # type: ignore[attr-defined]

    def right(made: TextModel, texts: object) -> float:
        with torch.no_grad():
            logits, labels = made.from_embeddings(texts.theta, texts.labels)  # type: ignore[attr-defined]
        return float((logits.argmax(-1) == labels).float().mean())

    assert right(teacher, target) == right(teacher, adversary) == 1.0
    assert ce(teacher, target) < ce(teacher, start)
    assert right(student, adversary) < right(student, target)
    assert ce(student, adversary) > max(ce(student, target), ce(teacher, adversary))
    assert torch.allclose(adversary.said, teacher.from_embeddings(adversary.theta, adversary.labels)[0].softmax(-1))


def test_the_kld_adversary_drives_teacher_and_student_apart(two: tuple[TextModel, TextModel]) -> None:
    teacher, student = two
    apart = {}
    for adversary in ("ce", "kl"):
        sampler = Sampler(student, Sampling(16, 12, "rows", 60, 0.1, adversary))  # type: ignore[arg-type]
        sampler.load({name: value.numpy() for name, value in teacher.trainable_state().items()})
        for strength in (0.0, 0.5):
            with torch.random.fork_rng():
                torch.manual_seed(1)
                made = sampler.sample("adversary", np.array([5, 5]), strength)
            apart[adversary, strength] = (made.theta, float(sampler.loss([made]).detach()))
    assert torch.equal(apart["ce", 0.0][0], apart["kl", 0.0][0])  # without strength both are eq. 6
    assert not torch.equal(apart["ce", 0.5][0], apart["kl", 0.5][0])
    assert apart["kl", 0.5][1] > apart["kl", 0.0][1]


def test_labels_follow_the_histogram_and_random_samples_are_rows_of_the_table(
    two: tuple[TextModel, TextModel],
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = pseudo.draw_labels(torch.tensor([0, 30, 10]), 4000)
        theta = pseudo.draw_rows(two[0].embed, two[0].embedding.num_embeddings, 3, 5)
        noise = pseudo.draw_gaussian(torch.tensor([[1.0, 10.0], [3.0, 30.0]]), 2000, 5)
    shares = torch.bincount(labels, minlength=3) / 4000
    assert shares[0] == 0
    assert abs(float(shares[1]) - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 4000)
    table = two[0].embedding.weight.detach()
    assert all((table == row).all(dim=1).any() for row in theta.view(-1, table.shape[1]))
    assert torch.allclose(noise.mean(dim=(0, 1)), torch.tensor([2.0, 20.0]), rtol=0.05)
    assert torch.allclose(noise.view(-1, 2).std(dim=0), torch.tensor([math.sqrt(2), 10 * math.sqrt(2)]), rtol=0.05)


def test_t5_answers_at_every_token_of_the_label_word() -> None:
    made = model("tiny-t5")
    theta, labels = made.embed(torch.arange(20).view(2, 10)).detach(), torch.tensor([1, 0])
    logits, tokens = made.from_embeddings(theta, labels)
    words = [made.tokenizer(text_target=TASK.labels[label]).input_ids for label in labels]
    assert tokens.tolist() == words[0] + words[1]
    assert logits.shape == (len(words[0]) + len(words[1]), made.embedding.num_embeddings)
    losses = []
    for text, word in zip(theta, words, strict=True):  # the library's own teacher forcing and loss, word by word
        with torch.no_grad():
            losses += [float(made.net(inputs_embeds=text[None], labels=torch.tensor([word])).loss)] * len(word)
    found = float(pseudo.target_loss(made.from_embeddings, theta, labels).detach())
    assert found == pytest.approx(sum(losses) / len(losses), abs=1e-5)


@pytest.mark.parametrize("name", ["tiny-roberta", "tiny-xlnet", "tiny-t5"])
def test_samples_come_down_their_loss_whatever_the_family(name: str) -> None:
    teacher, ends = model(name), []
    for steps in (0, 15):
        sampler = Sampler(model(name, seed=2), Sampling(4, 8, "rows", steps, 0.1))
        sampler.load({key: value.numpy() for key, value in teacher.trainable_state().items()})
        with torch.random.fork_rng():
            torch.manual_seed(1)
            made = sampler.sample("target", np.array([1, 1]), 0.1)
        ends.append(float(pseudo.target_loss(teacher.from_embeddings, made.theta, made.labels).detach()))
    assert ends[1] < ends[0] - 0.01


def test_adapted_models_read_embeddings_too_and_frozen_ones_stay() -> None:
    made = model("tiny-t5", lora={"r": 2})
    theta = made.embed(torch.arange(6).view(1, 6)).detach()
    assert made.from_embeddings(theta, torch.tensor([0]))[0].shape[1] == made.embedding.num_embeddings
    whole = model("tiny-t5")
    assert whole.embedding.weight.requires_grad
    with whole.frozen_embeddings():
        loss = whole(whole.encode(["a film"]).batch([0])).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert whole.embedding.weight.grad is None
        assert whole.net.lm_head.weight.grad is None  # tied
    assert whole.embedding.weight.requires_grad


def test_a_model_without_inputs_embeds_is_refused() -> None:
    from transformers import PerceiverConfig, PerceiverForSequenceClassification

    small = PerceiverConfig(
        d_model=16, d_latents=16, num_latents=4, num_blocks=1, num_self_attends_per_block=1,
        num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=32, max_position_embeddings=16,
    )  # fmt: skip
    net = PerceiverForSequenceClassification(small)
    made = TextModel(net, model().tokenizer, TASK, 16, torch.device("cpu"), bf16=False)
    with pytest.raises(ModelError, match=r"a perceiver model takes no inputs_embeds.*such as BERT"):
        Sampler(made, Sampling(1, 1, "rows", 1, 0.1))


def test_hidden_states_come_with_the_same_logits(two: tuple[TextModel, TextModel]) -> None:
    for made in (two[0], model("tiny-t5")):
        batch = made.encode(["a fine film", "bad"]).batch([0, 1])
        with torch.no_grad():
            logits, states = made.with_states(batch)
            assert torch.allclose(logits, made(batch), atol=1e-6)
        assert [tuple(state.shape) for state in states] == [(2, batch["input_ids"].shape[1], 128)] * 3


def test_feddrs_parameters_have_the_papers_values() -> None:
    from fedstill.strategies import find_method

    _, p = find_method(load_run('[method]\nname = "feddrs"\n').method)
    values = p.model_dump()
    wanted = {
        "local_epochs": 5, "participation": 0.8, "optimizer": "adafactor", "samples": 250, "iterations": 1,
        "post_iterations": 3, "lambda_": 0.1, "sample_steps": 100, "sample_rate": 0.1, "pseudo_texts": 64,
        "pseudo_length": 64, "balance": True,
    }  # fmt: skip
    assert {name: values[name] for name in wanted} == wanted
