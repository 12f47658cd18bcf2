"""ATC's parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedstill.strategies.base import Params


class ATCParams(Params):
    """`local_epochs` are those of the own task, in CONTRAST."""

    assign_rounds: int | None = Field(None, ge=0)  # two thirds of the rounds; 0: no ASSIGN
    assign_steps: int = Field(50, ge=1)
    corruption: Literal["both", "mlm", "denoising"] = "both"
    clustering: bool = True
    clusters: int = Field(5, ge=1)
    contrast: bool = True  # false: FedAvg of the encoder in its place
    contrast_loss: bool = True
    contrast_through: Literal["decoder", "encoder"] = "decoder"  # what h passes, and eq. 3 trains
    neighbours: int = Field(8, ge=1)  # K
    # another K for some sites: by a site's name, or by `cnndm` for cnndm-1, cnndm-2 ...; it tells that they differ
    neighbours_of: dict[str, Annotated[int, Field(ge=1)]] = Field({})
    temperature: float = Field(1.0, gt=0)
    items: int = Field(1024, ge=1)
    positions: int = Field(128, ge=1)
    clip: float = Field(0.0, ge=0)  # norm of each vector that a site shows; 0: as it is
    noise: float = Field(0.0, ge=0)  # standard deviation, in units of `clip`
    horizon: float = Field(1.0, ge=1)  # of CONTRAST's schedule, in lengths of CONTRAST
