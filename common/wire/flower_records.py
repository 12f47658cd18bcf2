"""The same content as Flower's records; the only file that uses them. `messages` mode sends these."""

from __future__ import annotations

import json

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedstill.common.states import Arrays, State
from fedstill.common.wire.encoding import HEAD_LIMIT, Facts, decode
from fedstill.common.wire.errors import WireError


def to_records(arrays: State, facts: Facts) -> RecordDict:
    """Return the content as a Flower RecordDict."""
    record = ArrayRecord({name: _to_array(value) for name, value in arrays.items()})
    return RecordDict({"arrays": record, "facts": ConfigRecord({"json": json.dumps(facts)})})


def from_records(content: RecordDict) -> tuple[Arrays, Facts]:
    """Return the arrays and facts of a RecordDict that `to_records` made."""
    try:
        text = str(content.config_records["facts"]["json"])
        if len(text) > HEAD_LIMIT:
            raise WireError(f"the facts of a Flower message take {len(text):,} bytes, more than {HEAD_LIMIT:,}")
        facts = json.loads(text)
        if not isinstance(facts, dict):
            raise WireError("the facts of a Flower message are not a table")
        arrays = {name: _from_array(name, value) for name, value in content.array_records["arrays"].items()}
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"a Flower message cannot be read: {error}") from None
    return arrays, facts


def _to_array(value: np.ndarray) -> Array:
    return Array(
        dtype=value.dtype.name, shape=tuple(value.shape), stype="raw", data=np.asarray(value, order="C").tobytes()
    )


def _from_array(name: str, value: Array) -> np.ndarray:
    head = {"arrays": [[name, value.dtype, list(value.shape)]]}
    return decode(head, memoryview(value.data))[0][name]
