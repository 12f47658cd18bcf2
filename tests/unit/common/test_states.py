"""States that wait on disk or are made when asked for: the same numbers, and no more memory than a block."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedstill.common.maths.ensemble import mean_arrays
from fedstill.common.maths.similarity import cosines, halves, inner_products, should_split
from fedstill.common.states import BLOCK, LazyState, blocks_of, copied, differences, private_names, shapes_of
from fedstill.common.wire import Ask, Reply, WireError, check_reply, same_shapes
from fedstill.common.wire.frames import CHUNK, REPLY, Frame, cut, join
from fedstill.common.wire.heads import squeeze, varint
from fedstill.common.wire.spool import Spool

RNG = np.random.default_rng(3)
STATE = {
    "large": RNG.standard_normal((BLOCK // 100 + 3, 130)).astype(np.float32),  # more than a block, and an odd end
    "none": np.zeros((0, 4), np.float32),
    "one": np.array(2.5, np.float64),
    "counts": np.arange(7),
    "flags": np.array([True, False]),
}


def received(state: dict[str, np.ndarray], spool: Spool | None) -> Frame:
    (frame,) = join(cut(Frame(REPLY, 3, state, {"metrics": {"texts": 5}})), 1 << 30, lambda size: None, spool)
    return frame


def test_a_spooled_frame_is_the_one_in_memory_bit_by_bit(tmp_path: Path) -> None:
    kept, spooled = received(STATE, None), received(STATE, Spool(tmp_path, above=100))
    assert isinstance(spooled.arrays, LazyState)
    assert not isinstance(kept.arrays, LazyState)
    assert list(tmp_path.iterdir()) == []  # the file has no name: nothing is left behind, whatever happens
    assert (spooled.kind, spooled.number, spooled.facts) == (kept.kind, kept.number, kept.facts)
    assert list(spooled.arrays) == list(kept.arrays)
    for name, value in kept.arrays.items():
        found = spooled.arrays[name]
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
        assert b"".join(block.tobytes() for block in blocks_of(spooled.arrays, name)) == value.tobytes()
        assert all(block.size <= BLOCK for block in blocks_of(spooled.arrays, name))
        assert not found.flags.writeable
    with pytest.raises(KeyError):
        spooled.arrays["other"]


def test_small_frames_stay_in_memory_and_the_file_goes_with_the_state(tmp_path: Path) -> None:
    assert not isinstance(received({"x": np.zeros(10)}, Spool(tmp_path)).arrays, LazyState)
    before, spool = len(os.listdir("/proc/self/fd")), Spool(tmp_path, above=100)
    frame = received(STATE, spool)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del frame, spool
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_takes_another_body_once_nobody_can_read_the_first(tmp_path: Path) -> None:
    def files() -> list[int]:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        ours = [link for link in links if os.path.lexists(link) and os.readlink(link).startswith(str(tmp_path))]
        return [os.stat(link).st_size for link in ours]

    spool = Spool(tmp_path, above=100)
    first = received(STATE, spool).arrays
    blocks = blocks_of(first, "large")
    start = next(blocks)
    del first
    second = received({"x": np.ones(1000)}, spool).arrays
    assert len(files()) == 2  # the blocks of the first are still being read
    rest = [start, *blocks]
    assert np.array_equal(np.concatenate(rest), STATE["large"].reshape(-1))
    del blocks, rest, start
    third = received({"x": np.zeros(1000)}, spool).arrays
    assert files() == [8000, 8000]  # the longer body's room on disk is free again
    assert np.array_equal(second["x"], np.ones(1000))
    assert np.array_equal(third["x"], np.zeros(1000))


def test_a_body_that_breaks_off_leaves_its_file_to_the_next(tmp_path: Path) -> None:
    spool, messages = Spool(tmp_path, above=100), list(cut(Frame(REPLY, 1, {"a": np.zeros(3 * CHUNK, np.uint8)})))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(WireError):
            list(join(messages[:-1], 1 << 30, lambda size: None, spool))
    frame = received(STATE, spool)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert frame.arrays["large"].tobytes() == STATE["large"].tobytes()


@pytest.mark.parametrize("change", ["short", "long", "head"])
def test_a_spooled_frame_that_does_not_fit_is_refused(tmp_path: Path, change: str) -> None:
    frame = Frame(REPLY, 1, {"a": np.zeros(3 * CHUNK, np.uint8)})
    messages = list(cut(frame))
    if change == "short":
        messages = messages[:-1]
    elif change == "long":
        messages[-1] += b"x"
    else:
        good, bad = squeeze(frame.text), squeeze(frame.text.replace(b"uint8", b"uint9"))
        announced = (varint(len(good)) + varint(3 * CHUNK) + good, varint(len(bad)) + varint(3 * CHUNK) + bad)
        assert announced[0] in messages[0]
        messages[0] = messages[0].replace(*announced)
    with pytest.raises(WireError):
        list(join(messages, 1 << 30, lambda size: None, Spool(tmp_path, above=100)))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(WireError, match=r"cannot be kept on disk .*free some space where .*gone"):
        received(STATE, Spool(tmp_path / "gone", above=100))


def test_checks_find_in_a_spooled_state_what_they_find_in_memory(tmp_path: Path) -> None:
    bad = {**STATE, "large": STATE["large"].copy()}
    bad["large"][-1, -1] = np.nan
    ask = Ask("train.parameters", check=same_shapes(STATE))
    check_reply(ask, Reply("north", received(STATE, Spool(tmp_path, above=100)).arrays))
    with pytest.raises(WireError, match="'large' has NaN"):
        check_reply(ask, Reply("north", received(bad, Spool(tmp_path, above=100)).arrays))
    less = {name: value for name, value in STATE.items() if name != "one"}
    with pytest.raises(WireError, match="one is missing"):
        check_reply(ask, Reply("north", received(less, Spool(tmp_path, above=100)).arrays))


def test_the_mean_of_spooled_states_is_that_of_states_in_memory(tmp_path: Path) -> None:
    other = {name: (value * 3 if value.dtype.kind == "f" else value) for name, value in STATE.items()}
    weights = {"a": 0.75, "b": 0.25}
    memory = mean_arrays({"a": STATE, "b": other}, weights)
    spool = Spool(tmp_path, above=100)
    disk = mean_arrays({"a": received(STATE, spool).arrays, "b": received(other, spool).arrays}, weights)
    assert shapes_of(memory) == shapes_of(disk) == shapes_of(STATE)
    for name, value in STATE.items():
        assert disk[name].tobytes() == memory[name].tobytes()
        expected = value if value.dtype.kind != "f" else (0.75 * value + 0.25 * 3 * value.astype(np.float64))
        assert np.allclose(disk[name], expected, rtol=1e-6)
    same = mean_arrays({"a": STATE, "b": STATE}, {"a": 1 / 3, "b": 2 / 3})
    assert np.array_equal(same["large"], STATE["large"])


def test_a_copy_in_one_piece_is_a_copy() -> None:
    found = copied(STATE)
    for name, value in STATE.items():
        assert (found[name].dtype, found[name].shape, found[name].tobytes()) == (
            value.dtype, value.shape, value.tobytes(),
        )  # fmt: skip
        assert not np.shares_memory(found[name], value)
        assert found[name].flags.aligned
        assert found[name].flags.c_contiguous
    before = found["one"].copy()
    found["counts"][...] = -1
    assert np.array_equal(found["one"], before)


def test_differences_name_what_is_missing_too_much_or_of_another_shape() -> None:
    wanted, found = {"a": (2,), "b": (3, 1), "c": ()}, {"a": (2,), "b": (1, 3), "d": (1,)}
    assert differences(found, wanted) == [
        "c is missing",
        "d is not part of this model",
        "b has shape (1, 3) instead of (3, 1)",
    ]
    assert differences(wanted, wanted) == []


def test_patterns_match_whole_names_and_mind_the_case() -> None:
    names = ["head.weight", "a.LayerNorm.bias", "a.layer_norm.bias", "subhead.weight"]
    assert private_names(names, ["head*"]) == {"head.weight"}
    assert private_names(names, ["*[Nn]orm*"]) == {"a.LayerNorm.bias", "a.layer_norm.bias"}
    assert private_names(names, ["*layernorm*"]) == frozenset()


def test_products_and_cosines_of_updates_over_several_arrays() -> None:
    first = [np.array([[1.0, 0.0]]), np.array([[0.0, 2.0]]), np.zeros((1, 2))]  # one array of each of three sites
    second = [np.array([2.0]), np.array([1.0]), np.array([0.0])]
    products = inner_products([first, second])
    assert np.allclose(products, [[5, 2, 0], [2, 5, 0], [0, 0, 0]])
    assert np.allclose(cosines(products), [[1, 0.4, 0], [0.4, 1, 0], [0, 0, 1]])


def test_a_cluster_splits_when_its_mean_rests_and_a_member_does_not() -> None:
    way = np.array([1.0, 1.2, -1.0, -1.2])
    products, equal = np.outer(way, way), np.full(4, 0.25)
    assert should_split(products, equal, 0.1, 1.1)
    assert not should_split(products, equal, 0.1, 1.3)  # nobody pulls hard enough
    assert not should_split(products, np.array([1.0, 0, 0, 0]), 0.1, 1.1)  # the mean has not come to rest
    assert not should_split(products[:2, :2], np.array([0.5, 0.5]), 9.0, 0.1)  # two sites stay together
    assert halves(cosines(products)).tolist() == [0, 0, 1, 1]
