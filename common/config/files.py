"""Configuration from TOML: files that extend files, overrides, and errors that name the key and the remedy."""

from __future__ import annotations

import copy
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedstill.common.config import ConfigError, RunConfig, SiteFile

S = TypeVar("S", bound=BaseModel)


def check(kind: type[S], values: Mapping[str, Any], source: str) -> S:
    """Validate `values` as `kind`, or raise a ConfigError that names each wrong key of `source`."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        lines = [_explain(kind, dict(e)) for e in error.errors()]
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {line}" for line in lines)) from None


Overrides = Iterable[str] | Mapping[str, Any]  # `key=value` as on the command line, or values by dotted key


def load_run(source: str | Path, overrides: Overrides = (), root: Path | None = None) -> RunConfig:
    """Load a run's configuration from a TOML file, or from TOML or JSON text, with overrides by dotted key.

    A file may hold `extends = "other.toml"`, a path relative to its own folder: it then holds only the differences.
    """
    values, name = read_merged_values(source, root)
    if isinstance(values.get("rows"), dict):
        raise ConfigError(
            f"{name}: is a table of runs, not one run; name a row with --row (rows: {', '.join(values['rows'])}), "
            "or run all of it: fedstill compare"
        )
    return resolve_run(values, name, overrides)


def resolve_run(values: Mapping[str, Any], source: str, overrides: Overrides = ()) -> RunConfig:
    """Build a run from its raw tables: expand counted sites, apply overrides, check every key."""
    resolved = _with_counted_sites(copy.deepcopy(dict(values)), source)
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_parsed, overrides)
    for key, value in pairs:
        _assign(resolved, key, value)
    return check(RunConfig, _with_counted_sites(resolved, source), source)  # an override may have added a count


def load_site(path: Path) -> SiteFile:
    """Load a site's own configuration file; relative paths in it start at its folder."""
    values, name = read_values(path)
    site, folder = check(SiteFile, values, name), Path(path).expanduser().resolve().parent
    return _from_folder(site, folder)


def _from_folder(section: S, folder: Path) -> S:
    """Return the section with every relative path made absolute."""
    changes: dict[str, Any] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Path):
            changes[key] = folder / value.expanduser()
        elif isinstance(value, BaseModel):
            changes[key] = _from_folder(value, folder)
        elif key == "model" and isinstance(value, str) and value.startswith(("./", "../", "~")):
            changes[key] = str(folder / Path(value).expanduser())
    return section.model_copy(update={key: value for key, value in changes.items() if value != getattr(section, key)})


def read_values(source: str | Path, root: Path | None = None) -> tuple[dict[str, Any], str]:
    """Return the raw tables of a configuration, and its name for errors."""
    text = str(source)
    if isinstance(source, str) and ("\n" in text or text.lstrip().startswith("{")):
        loads = json.loads if text.lstrip().startswith("{") else tomllib.loads
        name = "configuration text"
    else:
        path = Path(source)
        if root is not None and not path.is_absolute():
            path = root / path
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from None
        loads, name = tomllib.loads, str(path)
    try:
        values = loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{name}: not valid {'JSON' if loads is json.loads else 'TOML'}: {error}") from None
    return dict(values), name


def read_merged_values(source: str | Path, root: Path | None = None) -> tuple[dict[str, Any], str]:
    """As `read_values`, with everything that a file extends merged in."""
    values, name = read_values(source, root)
    below: list[Path] = []
    path = Path(name)
    while "extends" in values:
        parent = values.pop("extends")
        if not isinstance(parent, str) or name == "configuration text":
            raise ConfigError(f'{name}:\n  extends: write the path of a TOML file, from a file: extends = "base.toml"')
        below.append(path.resolve())
        path = path.parent / Path(parent).expanduser()
        if path.resolve() in below:
            chain = " -> ".join(each.name for each in [*below, path])
            raise ConfigError(f"{name}:\n  extends: the files extend each other in a circle ({chain}); take one out")
        if not path.is_file():
            raise ConfigError(f"{below[-1]}:\n  extends: there is no file {path}; paths begin at the file's own folder")
        values = merged(read_values(path)[0], values)
    return values, name


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables key by key; anything else, lists included, comes from the upper one."""
    result = dict(under)
    for key, value in over.items():
        beneath = result.get(key)
        both = isinstance(beneath, dict) and isinstance(value, dict)
        result[key] = merged(beneath, value) if both else value  # type: ignore[arg-type]
    return result


def _with_counted_sites(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Expand sites with `count = 10` into ten that differ only in name: NAME-1 to NAME-10."""
    sites = values.get("sites")
    if not isinstance(sites, list):  # the overall check reports what is wrong with it
        return values
    expanded: list[Any] = []
    for number, site in enumerate(sites):
        if isinstance(site, dict) and "count" in site:
            expanded += _counted(site, f"{source}:\n  sites.{number}")
        else:
            expanded.append(site)
    names = [site.get("name") for site in expanded if isinstance(site, dict)]
    for site in sites:
        if isinstance(site, dict) and "count" in site:
            name, count = site["name"], site["count"]
            twice = [
                candidate for candidate in (f"{name}-{n}" for n in range(1, count + 1)) if names.count(candidate) > 1
            ]
            if twice:
                raise ConfigError(
                    f"{source}:\n  sites: count = {count} makes {name}-1 to {name}-{count} of the site {name!r}, "
                    f"and there is another {twice[0]!r}; give one of them another name"
                )
    return {**values, "sites": expanded}


def _counted(site: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the sites that one with a count stands for."""
    count, name = site["count"], site.get("name")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{where}.count: write how many equal sites there are, from 1 on: count = 10 (got {count!r})")
    if not isinstance(name, str):
        raise ConfigError(f'{where}.name: a site with a count needs one; name = "client" makes client-1, client-2 ...')
    shared = {key: value for key, value in site.items() if key != "count"}
    return [{**copy.deepcopy(shared), "name": f"{name}-{number}"} for number in range(1, count + 1)]


def _parsed(text: str) -> tuple[str, Any]:
    """Parse one `--set a.b=value`; the value is TOML, or a plain word."""
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {text!r}: write key=value, for example --set method.name=ds-fl")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return key.strip(), value


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a value at a dotted key, creating tables on the way."""
    *path, last = key.split(".")
    place: Any = values
    for part in path:
        place = place[_index(place, part, key)] if isinstance(place, list) else place.setdefault(part, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {key}: {part!r} is a value, not a table")
    if isinstance(place, list):
        place[_index(place, last, key)] = value
    else:
        place[last] = value


def _index(rows: list[Any], part: str, key: str) -> int:
    """Return the index of a list entry by number, or of a site by name."""
    for number, row in enumerate(rows):
        if part == str(number) or (isinstance(row, dict) and row.get("name") == part):
            return number
    raise ConfigError(f"--set {key}: there is no entry {part!r}; use a number below {len(rows)} or a site's name")


def _explain(kind: type[BaseModel], error: dict[str, Any]) -> str:
    """Describe one validation error: the key, what is wrong, and the closest key if it is unknown."""
    parts = [part for part in error["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    key = ".".join(str(part) for part in parts)
    if error["type"] == "extra_forbidden":
        known = _keys_at(kind, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return f"{key}: unknown key; {hint}"
    message = str(error["msg"]).removeprefix("Value error, ")
    given = error.get("input")
    shown = f" (got {given!r})" if not isinstance(given, dict | list) and "missing" not in error["type"] else ""
    return f"{key}: {message}{shown}" if key else f"{message}{shown}"  # without a key: several do not go together


def _keys_at(kind: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Return the keys that the table at `path` may have."""
    fields = kind.model_fields
    for part in path:
        if not isinstance(part, str) or part not in fields:
            continue
        nested = _section_of(fields[part].annotation)
        if nested is None:
            return []
        fields = nested.model_fields
    return [field.alias or name for name, field in fields.items()]


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic class inside an annotation such as `list[SiteConfig]` or `LoraConfig | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        section = _section_of(inner)
        if section is not None:
            return section
    return None
