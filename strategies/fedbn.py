"""FedBN. Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021."""

from __future__ import annotations

from typing import ClassVar

from fedstill.strategies.fedavg import FedAvg

NORMS = ["*[Nn]orm*"]  # LayerNorm, layer_norm, BatchNorm: however the model's family writes it


class FedBN(FedAvg):
    """FedAvg that leaves the normalisation parameters where they are (LayerNorm in language models)."""

    name = "fedbn"
    paper = "Li et al. 2021"
    presets: ClassVar = {"paper": {"private": NORMS}, "authors_code": {"private": NORMS, "schedule": "call"}}
