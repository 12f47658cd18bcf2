"""The server of sites with different tasks: it holds shared parameters, and has no task, no texts and no score."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fedstill.common.config import RunConfig
from fedstill.common.data.splits import Splits, TextSet
from fedstill.common.models.bert2bert import GROUPS, MixedModel, load_mixed
from fedstill.common.models.learner import Learner
from fedstill.common.randomness import derive
from fedstill.common.wire import Arrays
from fedstill.server.central import NAME, Student


class Holder(Student):
    """A central model that is never trained nor tested: the first state of all sites, and a mean of what they share."""

    def __init__(self, config: RunConfig) -> None:
        if config.central.threads is not None:
            torch.set_num_threads(config.central.threads)
        none = TextSet((), np.empty(0, np.int64))
        self.config = config
        self.texts = Splits(none, none, none, none)
        self.fingerprint = none.fingerprint()
        self.model = load_mixed(config.central.model_settings(config.train), 0, derive(config.seed, NAME, "model"))
        self.learner = Learner(NAME, self.model, config.central, config.train, config.seed)
        self.public = self.labelled = self.test_texts = self.model.encode([])
        self.labels = torch.empty(0, dtype=torch.long)
        self._place = (0, 0)

    model: MixedModel

    def test(self) -> dict[str, float]:
        """Nothing: the tasks are the sites'."""
        return {}

    def shared(self) -> Arrays:
        """Encoder, decoder and MLM head, as every site begins with them."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.model.group(GROUPS).items()}

    def load_shared(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over a state of encoder, decoder and MLM head, such as a mean."""
        self.model.fill(
            self.model.group(GROUPS), {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
        )

    def read_tokens(self, features: np.ndarray) -> np.ndarray:
        """argmax of the held MLM head for features (items x places)."""
        self.model.eval()
        with self._next_place(), torch.inference_mode():
            rows = (torch.from_numpy(item).to(self.model.device) for item in features)
            return np.stack([self.model.tokens(row).argmax(dim=-1).cpu().numpy().astype(np.int32) for row in rows])


def make_student(config: RunConfig) -> Student:
    """The server's side of a run, as its task wants it."""
    return Holder(config) if config.mixed else Student(config)
