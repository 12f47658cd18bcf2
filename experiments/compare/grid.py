"""Families of tables: axes with named values, one table for each combination of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from fedstill.common.config import NAME, ConfigError

Axes = Mapping[str, Mapping[str, Any]]  # axis -> value -> what the value changes
Combination = dict[str, str]  # axis -> value


def check_axes(axes: Axes, source: str) -> None:
    """Refuse axes without values, and names that do not fit a run's folder or `--only`."""
    for axis, values in axes.items():
        if not values:
            raise ConfigError(f"{source}:\n  grid.{axis}: the axis has no value; write [grid.{axis}.NAME] for each")
        for name in (axis, *values):
            if not re.fullmatch(NAME, name):
                raise ConfigError(f"{source}:\n  grid.{axis}: {name!r} has other signs than letters, digits and . _ -")


def combinations(axes: Axes) -> list[Combination]:
    """Return every combination in the file's order, the last axis fastest; a table without axes has one."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def parse(text: str, axes: Axes, where: str) -> Combination:
    """Parse `task=sst2,alpha=1` into fixed axes; errors list the known axes or values."""
    if not axes:
        raise ConfigError(f"{where}: the table has no [grid], so there is nothing to choose; leave {text!r} out")
    fixed = {}
    for part in text.split(","):
        axis, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator:
            raise ConfigError(f"{where}: write AXIS=VALUE, such as {_example(axes)} (got {part.strip()!r})")
        if axis not in axes:
            raise ConfigError(f"{where}: there is no axis {axis!r}; axes: {', '.join(axes)}")
        if value not in axes[axis]:
            raise ConfigError(f"{where}: {axis} has no value {value!r}; values: {', '.join(axes[axis])}")
        fixed[axis] = value
    return fixed


def fits(combination: Combination, fixed: Combination) -> bool:
    """Return whether a combination has all the fixed values."""
    return all(combination[axis] == value for axis, value in fixed.items())


def chosen(every: Iterable[Combination], only: Iterable[str], axes: Axes, source: str) -> list[Combination]:
    """Return the combinations that `--only` selects: any of the values named for an axis, for every axis."""
    wanted: dict[str, set[str]] = {}
    for text in only:
        for axis, value in parse(text, axes, f"{source}:\n  --only {text}").items():
            wanted.setdefault(axis, set()).add(value)
    selected = [
        combination for combination in every if all(combination[axis] in values for axis, values in wanted.items())
    ]
    if not selected:
        raise ConfigError(f"{source}:\n  --only {' --only '.join(only)}: the table has no such combination")
    return selected


def folder_suffix(combination: Combination) -> str:
    """Return a suffix such as -sst2-alpha1: purely numeric values have their axis before them."""
    return "".join(f"-{'' if value[0].isalpha() else axis}{value}" for axis, value in combination.items())


def filled(text: str, titles: Mapping[str, str], where: str) -> str:
    """Replace {axis} in a text by the name of the axis' value."""
    for axis in re.findall(r"\{(\w+)\}", text):
        if axis not in titles:
            known = f"axes: {', '.join(titles)}" if titles else "the table has no [grid]"
            raise ConfigError(f"{where}: {{{axis}}} stands for an axis, and there is no axis {axis!r}; {known}")
        text = text.replace(f"{{{axis}}}", titles[axis])
    return text


def _example(axes: Axes) -> str:
    axis = next(iter(axes))
    return f"{axis}={next(iter(axes[axis]))}"
