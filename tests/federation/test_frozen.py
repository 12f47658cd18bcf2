"""Federations on frozen encoders and of decoder-only models: methods work on what is trained, and refuse the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedstill.common.config import RunConfig
from fedstill.common.models.frozen import FrozenEncoder

from .conftest import Federation, streams

SHARED = Path(__file__).parents[3] / "shared"
Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("rounds=1", "report.alone=false", "report.centralized=false")


def sites(*models: str) -> str:
    names = ("north", "south", "east", "west")
    rows = [f'{{name="{name}", {model}}}' for name, model in zip(names, models, strict=False)]
    return f"sites=[{', '.join(rows)}]"


FROZEN = sites(
    'model="small-bert", freeze="encoder"',
    'model="small-roberta", freeze="encoder", head="mlp"',
    'model="small-xlnet", freeze=2',
    'model="small-t5", freeze="encoder", pooling="first"',
)


@pytest.mark.parametrize("method", ["fedid", "ds-fl", "adafd", "fedmd", "cronus"])
def test_predictions_of_frozen_models_of_four_families_train_a_central_model(
    federation: Make, small: Small, method: str
) -> None:
    made = federation(small(*QUICK, f"method.name={method}", FROZEN, "central.model=small-bert",
                            "central.freeze=encoder"))  # fmt: skip
    before = made.weights()
    made.run()
    assert made.weights() != before
    assert len(made.events("round_finished")) == 1


def test_exact_feedback_goes_through_a_frozen_encoder(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "method.name=fedid", "method.feedback=exact", FROZEN, "central.model=small-bert",
                            "central.freeze=2"))  # fmt: skip
    made.run()
    assert made.events("round_finished")


def test_only_heads_travel_and_the_average_is_of_heads(federation: Make, small: Small) -> None:
    same = 'model="small-bert", freeze="encoder"'
    made = federation(small(*QUICK, "method.name=fedavg", sites(same, same), "central.model=small-bert",
                            "central.freeze=encoder"))  # fmt: skip
    made.run()
    assert isinstance(made.central.learner.model, FrozenEncoder)
    assert list(made.central.weights()) == ["head.1.weight", "head.1.bias"]
    sent = {name: value.nbytes for name, value in made.nodes[0].learner.weights().items()}
    assert sent == {"head.1.weight": 4 * 2 * 192, "head.1.bias": 4 * 2}


def test_the_card_of_a_head_says_how_to_use_it(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "method.name=ds-fl", "central.model=small-bert", "central.freeze=encoder"))
    made.run()
    folder = made.record.folder
    card = (folder / "central" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    assert "RUN" in code
    found: dict[str, object] = {}
    exec(code.replace("RUN", str(folder), 1), found)
    (answer,) = found["classify"](["a text"])  # type: ignore[operator]
    assert answer["label"] in ("negative", "positive")


def test_heads_on_other_encoders_are_not_averaged(federation: Make, small: Small, tmp_path: Path) -> None:
    made = federation(small(*QUICK, "method.name=fedavg", sites('model="small-bert", freeze=1', 'model="small-bert"'),
                            "central.model=small-bert", "central.freeze=1"))  # fmt: skip
    with pytest.raises(Exception, match="same model"):
        made.run()


def test_the_same_weights_over_streams_as_in_one_process(federation: Make, small: Small) -> None:
    config = small(*QUICK, "method.name=fedid", FROZEN, "central.model=small-bert", "central.freeze=encoder")
    plain = federation(config)
    plain.run()
    streamed = federation(config)
    with streams(streamed) as link:
        streamed.run(link)
    assert streamed.weights() == plain.weights()


@pytest.mark.parametrize("method", ["feddrs"])
def test_methods_that_need_embeddings_refuse_frozen_encoders(federation: Make, small: Small, method: str) -> None:
    same = 'model="small-bert", freeze="encoder"'
    with pytest.raises(Exception, match="take freeze out"):
        federation(small(*QUICK, f"method.name={method}", sites(same, same), "central.model=small-bert",
                         "central.freeze=encoder")).run()  # fmt: skip


@pytest.mark.shared
def test_a_llama_learns_with_bert_and_t5(federation: Make, small: Small) -> None:
    folder = SHARED / "weights" / "llama-stories15m"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: it has the real Llama of this test")
    made = federation(small(
        *QUICK, "method.name=fedid", 'task.prompt="Review: {text}\\nThe film was"', 'task.label_words=["bad", "good"]',
        sites('model="small-bert"', 'model="small-t5"', f'model="{folder}"'), "central.model=small-bert",
        "train.max_length=32",
    ))  # fmt: skip
    made.run()
    families = {node.learner.model.family for node in made.nodes}
    assert families == {"bert", "t5", "llama"}
    assert made.events("round_finished")
