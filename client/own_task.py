"""A site whose task is private: its model, its texts, its scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedstill.client.node import Node
from fedstill.common import checkpoint
from fedstill.common.config import ConfigError, RunConfig, SiteConfig
from fedstill.common.data.site_tasks import Work
from fedstill.common.data.splits import TextSet
from fedstill.common.maths.affinity import clipped
from fedstill.common.models.bert2bert import MixedModel, load_mixed
from fedstill.common.models.learner import Learner, Rows
from fedstill.common.models.text_model import TextModel
from fedstill.common.randomness import derive
from fedstill.common.wire import Arrays, Ask, Facts, Reply


class OwnTaskNode(Node):
    """A site that shares its encoder and, while the server assigns, its decoder and MLM head; the rest never leaves."""

    model: MixedModel
    task_is_secret = True

    def _load(self, config: RunConfig, site: SiteConfig, model: TextModel | None) -> None:
        assert model is None, "a model with private parts is not handed on"
        if site.task is None:
            raise ConfigError(
                f"site {site.name} has no task, and in this run every site has its own: write a [task] table with kind "
                "and train into its site.toml ([sites.task] in the run's file where all sites are on one machine)"
            )
        self.work = Work(site.task, derive(config.seed, site.name, "split"))
        # Drawn by shape, not by name: sites whose heads begin apart pull a shared encoder apart.
        outputs = self.work.outputs
        self.model = load_mixed(site.model_settings(config.train), outputs, derive(config.seed, "model", outputs))
        self.model.smoothing = site.task.label_smoothing
        self.learner = Learner(site.name, self.model, site, config.train, config.seed)
        examples = self.work.examples(self.model)
        self.lessons, self.private = examples, examples.inputs
        self.public = self.model.encode([])
        self.fingerprint = TextSet(()).fingerprint()

    def greeting(self) -> Facts:
        """Name the site; reveal nothing that depends on the task, not even the size of the private head."""
        return {
            "name": self.name,
            "family": self.model.family,
            "model": Path(self.site.model).name,
            "parameters": sum(value.numel() for value in self.model.group(("encoder", "decoder", "mlm")).values()),
            "texts": self.size,
            "public": self.fingerprint,
            "public_texts": 0,
            "rounds": checkpoint.whole_rounds(self.checkpoints),
        }

    @property
    def size(self) -> int:
        """How many items the site has: a question on a long passage is one, however many windows it is read in."""
        return len(self.work.train)

    def answer(self, ask: Ask) -> Reply:
        """Answer as any site does; remember verb and round for the file of scores."""
        self._asked = {"verb": ask.verb, "round": ask.settings.get("round", 0)}
        return super().answer(ask)

    def private_loss(self, outputs: Tensor, places: Rows) -> Tensor:
        """Return the model's output: for a batch with answers it is the loss already, whatever the task."""
        return outputs

    def test_scores(self) -> Facts:
        """Return the mean of the task's metrics; they stay in a local file, since their names would reveal the task."""
        scores = self.work.scores(self.model)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "scores.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self._asked, "kind": self.work.task.kind, **scores}) + "\n")
        return {"score": sum(scores.values()) / len(scores)}

    def own_scores(self) -> dict[str, float]:
        """Return the task's metrics at the last test, which in a real federation only this site sees."""
        path = self.folder / "scores.jsonl"
        last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1]) if path.exists() else {}
        return {name: float(value) for name, value in last.items() if name not in ("verb", "round", "kind")}

    # --- what the verbs of ATC share ---

    def shared(self, groups: Sequence[str]) -> Arrays:
        """Return copies of shared groups of parameters."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.model.group(groups).items()}

    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load shared parameters that the server computed."""
        known = self.model.group(("encoder", "decoder", "mlm"))
        shared = {name: known[name] for name in arrays if name in known}
        self.model.fill(shared, {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})

    def shown(self, vectors: np.ndarray, clip: float, noise: float) -> np.ndarray:
        """Return vectors as the server may see them: clipped and with Gaussian noise if asked, in half precision."""
        released = np.asarray(vectors, np.float32)
        if clip > 0:
            released = clipped(released, clip)
        if noise > 0:
            released += (self.draw_noise(released.shape) * (noise * clip)).astype(np.float32)
        return released.astype(np.float16)


def node_kind(config: RunConfig) -> type[Node]:
    """Return the class of a site for the run's task."""
    return OwnTaskNode if config.mixed else Node


def make_node(config: RunConfig, site: SiteConfig, run: str, state_root: Path, model: TextModel | None = None) -> Node:
    """Build the site, ready to answer; given a model of its kind, it loads none (only where tasks are shared)."""
    return node_kind(config)(config, site, run, state_root, model)
