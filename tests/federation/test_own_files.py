"""Sites that bring their own files: nobody but the site reads them, and the public texts are agreed by hash."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstill.common.config import PrivacyConfig, RunConfig, SiteConfig
from fedstill.common.config.files import load_run, load_site
from fedstill.common.data.allocation import site_texts
from fedstill.common.data.tasks import TaskError, film_reviews
from fedstill.common.wire import Ask
from fedstill.server.link import JoinError, LocalLink

from .conftest import Federation

LABELS = ("against", "for")


def write(path: Path, rows: list[int], label: str | None, text: str = "review") -> None:
    pool = film_reviews().train
    assert pool.labels is not None
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([text] if label is None else [text, label])
        for row in rows:
            said = [str(pool.texts[row])]
            writer.writerow(said if label is None else [*said, LABELS[pool.labels[row]]])


@pytest.fixture
def organisations(tmp_path: Path) -> Callable[..., tuple[RunConfig, list[SiteConfig]]]:
    """A coordinator's run and two sites with files, columns and configurations of their own."""
    rng = np.random.default_rng(4)
    rows = [part.tolist() for part in np.array_split(rng.permutation(30_000)[:300], 5)]
    write(tmp_path / "labelled.csv", rows[0], "verdict")
    write(tmp_path / "test.csv", rows[1], "verdict")
    write(tmp_path / "public.csv", rows[2], None)
    for number, name in ((3, "north"), (4, "south")):
        write(tmp_path / f"{name}.csv", rows[number], "code", text="note")
        write(tmp_path / f"{name}-public.csv", rows[2], None, text="note")

    def make(*changes: str) -> tuple[RunConfig, list[SiteConfig]]:
        config = load_run(
            f"""
rounds = 1
task = {{ name = "files", train = "{tmp_path}/labelled.csv", test = "{tmp_path}/test.csv", text = "review",
  public = "{tmp_path}/public.csv", label = "verdict", labels = ["against", "for"] }}
data = {{ private = 0, public = 40, labelled = 16, test = 24 }}
train = {{ learning_rate = 1e-3, max_length = 16, batch_size = 16 }}
method = {{ name = "fedid", local_epochs = 1, distill_epochs = 1 }}
exchange = {{ sites = 2 }}
""".replace(",\n  public", ", public"),
            changes,
        )
        sites = []
        for name, model in (("north", "tiny-bert"), ("south", "tiny-t5")):
            path = tmp_path / f"{name}.toml"
            path.write_text(
                f'name = "{name}"\nmodel = "{model}"\n[data]\nprivate = "{tmp_path}/{name}.csv"\n'
                f'public = "{tmp_path}/{name}-public.csv"\ntext = "note"\nlabel = "code"\n'
            )
            sites.append(load_site(path))
        return config, sites

    return make


def nodes_of(made: Federation, config: RunConfig, sites: list[SiteConfig], folder: Path) -> list:
    from fedstill.client.node import Node

    return [Node(config, site, "run", folder / site.name) for site in sites]


def test_sites_with_files_of_their_own_train_together(
    federation: Callable[..., Federation], organisations: Callable, tmp_path: Path
) -> None:
    config, sites = organisations()
    made = federation(config)
    made.nodes = nodes_of(made, config, sites, tmp_path / "state")
    summary = made.run()
    assert summary["status"] == "finished"
    assert summary["centralized"] is None  # nobody has all the texts
    assert {name: site["texts"] for name, site in summary["sites"].items()} == {"north": 54, "south": 54}
    assert {site["family"] for site in summary["sites"].values()} == {"bert", "t5"}
    private = site_texts(config, sites[0])
    assert len(private.test) == 6  # a tenth of its own, kept back


def test_a_site_with_another_public_file_is_refused(
    federation: Callable[..., Federation], organisations: Callable, tmp_path: Path
) -> None:
    config, sites = organisations()
    public = tmp_path / "south-public.csv"
    lines = public.read_text().splitlines(keepends=True)
    public.write_text("".join([lines[0], *lines[2:], lines[1]]))  # the same texts in another order
    made = federation(config)
    made.nodes = nodes_of(made, config, sites, tmp_path / "state")
    with pytest.raises(JoinError, match="south: site south: another public set"):
        LocalLink(made.nodes, made.admit())


def test_a_label_that_the_run_does_not_know_names_file_and_row(organisations: Callable, tmp_path: Path) -> None:
    config, sites = organisations()
    with (tmp_path / "north.csv").open("a") as file:
        file.write("a note,unclear\n")
    with pytest.raises(TaskError, match=r"north\.csv, row 61: label 'unclear' is none of against, for"):
        site_texts(config, sites[0])


def test_without_the_labels_in_the_run_sites_could_number_them_differently(organisations: Callable) -> None:
    config, sites = organisations()
    config = config.model_copy(update={"task": config.task.model_copy(update={"labels": None})})
    with pytest.raises(TaskError, match=r"must list task\.labels"):
        site_texts(config, sites[0])


def test_the_central_model_is_tested_on_two_sets_in_one_run(
    federation: Callable[..., Federation], small: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """MNLI's matched and mismatched dev sets: the second has other texts, and its scores another name."""
    (tmp_path / "MNLI").mkdir()
    labels = ("entailment", "neutral", "contradiction")
    for file, count in (("train", 160), ("dev_matched", 30), ("dev_mismatched", 12)):
        rows = "".join(f"{n}\tfiction\t{file} {n}\tso {n % 7}\t{labels[n % 3]}\n" for n in range(count))
        head = "index\tgenre\tsentence1\tsentence2\tgold_label\n"
        (tmp_path / f"MNLI/{file}.tsv").write_text(head + rows)
    task = ("task.name=mnli", "task.second_test=mnli-mm", f"task.folder={tmp_path}", "method.name=ds-fl", "rounds=1")
    made = federation(small(*task, "report.alone=false", "report.centralized=false"))
    found = made.run()["central"]
    second = made.central.texts.second
    assert second is not None
    assert len(second) == 12
    logits = made.central.learner.predict(made.central.learner.model.encode(second.texts), np.arange(12))
    assert found["accuracy_mnli-mm"] == pytest.approx(float((logits.argmax(axis=1) == second.labels).mean()))
    assert "semantic_distance_mnli-mm" in found


def test_scores_of_a_part_of_a_sites_own_file_stay_there_after_dp_sgd_too(
    organisations: Callable[..., tuple[RunConfig, list[SiteConfig]]], tmp_path: Path
) -> None:
    """The run's seed cuts the test texts from the private file: their scores are of private texts."""
    config, sites = organisations()
    trains = PrivacyConfig(epsilon=50.0, train="dp-sgd", noise_multiplier=1.0)
    hidden = sites[0].model_copy(update={"privacy": trains})
    [node, other] = nodes_of(None, config, [hidden, sites[1]], tmp_path)  # type: ignore[arg-type]
    assert other.answer(Ask("evaluate.test")).metrics["accuracy"] >= 0
    with pytest.raises(ValueError, match=r"a part of this site's own file, and \[privacy\] does not let scores"):
        node.answer(Ask("evaluate.test"))
