"""A mkdocs hook: writes the pages under reference/ from the code at build time; none of them is committed."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import shutil
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "build/docs-package"  # the package as a wheel has it: mkdocstrings reads it there
ROOMS = ("client", "common", "deploy", "experiments", "server", "strategies")


# --- mkdocs ---


def on_startup(command: str, dirty: bool) -> None:
    """Lay the rooms out as one package."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    folder = PACKAGE / "fedstill"
    folder.mkdir(parents=True)
    for source in [*(ROOT / "fedstill").iterdir(), *(ROOT / room for room in ROOMS)]:
        if source.name != "__pycache__":
            (folder / source.name).symlink_to(source)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those that are written by hand."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files


# --- Markdown ---


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table; columns that are empty in every row are left out."""
    names, cells = list(head), [[cell(value) for value in row] for row in rows]
    kept = [i for i in range(len(names)) if i == 0 or any(row[i] for row in cells)]
    lines = ["| " + " | ".join(row[i] for i in kept) + " |" for row in [names, *cells]]
    return ["", lines[0], "|" + "---|" * len(kept), *lines[1:], ""]


def cell(value: object) -> str:
    """Text as it can stand in a table."""
    return " ".join(str(value).split()).replace("\\|", "|").replace("|", "\\|")


def code(value: object) -> str:
    """In backticks, or nothing."""
    return f"`{value}`" if str(value) else ""


def sentence(text: str) -> str:
    """With a capital letter where it begins with a plain word."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+\b(?![_.=])", text) else text


def page(title: str, intro: str, *parts: Iterable[str]) -> str:
    """A page from its parts."""
    return "\n".join([f"# {title}", "", intro, "", *(line for part in parts for line in part), ""])


# --- types, defaults and comments of fields ---

WORDS = {int: "integer", float: "number", str: "string", bool: "boolean", Path: "path", type(None): "none"}


def type_name(hint: Any) -> str:
    """A type in a reader's words."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_name(inside[0])
    if origin is Literal:
        return ", ".join(code(json.dumps(value)) for value in inside)
    if origin in (typing.Union, types.UnionType):
        names = [type_name(one) for one in inside if one is not type(None)]
        return "number" if set(names) == {"integer", "number"} else " or ".join(names)
    if origin in (list, tuple, set):
        kinds = [one for one in inside if one is not Ellipsis]
        if origin is tuple and len(kinds) > 1 and Ellipsis not in inside:
            return " and ".join(type_name(one) for one in kinds)
        name = type_name(kinds[0])
        return f"list of {name.replace('list of', 'lists of')}" if " " in name else f"list of {name}s"
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "table"
    if isinstance(hint, type) and hasattr(hint, "model_fields"):
        return "table"
    return WORDS.get(hint) or getattr(hint, "__name__", str(hint).removeprefix("typing."))


def bounds(field: Any) -> str:
    """`≥ 1` and the like, from pydantic's metadata."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(one, key):g}" for one in field.metadata for key, sign in signs.items() if hasattr(one, key)
    ]
    return ", ".join(found)


def shown(value: Any) -> str:
    """A value as it would stand in TOML; nothing for none."""
    if value is None:
        return ""
    if isinstance(value, Path):
        value = str(value)
    if hasattr(value, "model_dump"):
        return ""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def default_of(field: Any) -> str:
    """The default of a pydantic field, in backticks."""
    return "required" if field.is_required() else code(shown(field.get_default(call_default_factory=True)))


@cache
def comments(path: str) -> dict[int, tuple[str, bool]]:
    """The comments of a file by line, and whether each has its line for itself."""
    text = Path(path).read_text(encoding="utf-8")
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# ---", "# type", "# fmt", "# noqa")):
            found[token.start[0]] = (token.string.lstrip("# "), not token.line[: token.start[1]].strip())
    return found


@cache
def meanings(kind: type) -> dict[str, str]:
    """What the comments beside a class's fields, or above them, say of each; its bases' fields too."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("fedstill."):
            found.update(_own_meanings(base))
    return found


def _own_meanings(kind: type) -> Iterator[tuple[str, str]]:
    path = str(inspect.getsourcefile(kind))
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    node = next(one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == kind.__name__)
    known = comments(path)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            beside = [known[n][0] for n in range(line.lineno, (line.end_lineno or 0) + 1) if n in known]
            above = known.get(line.lineno - 1, ("", False))
            text = " ".join(beside) or (above[0] if above[1] else "")
            if text:
                yield line.target.id, text


# --- configuration ---


def section(title: str, kind: Any, level: int = 2, skip: Iterable[str] = ()) -> list[str]:
    """One table of a TOML file: its keys that are no tables themselves."""
    rows = []
    for name, field in kind.model_fields.items():
        if name in skip or type_name(field.annotation) in ("table", "list of tables"):
            continue
        limit = bounds(field)
        kind_of = type_name(field.annotation) + (f", {limit}" if limit else "")
        rows.append([code(field.alias or name), kind_of, default_of(field), sentence(meanings(kind).get(name, ""))])
    return [f"{'#' * level} {title}", "", inspect.cleandoc(kind.__doc__ or ""), *table(KEYS, rows)]


KEYS = ("key", "type", "default", "meaning")


def configuration() -> str:
    """Every key of a run's TOML."""
    from fedstill.common import config as c

    return page(
        "A run's configuration",
        "Every key that `fedstill run CONFIG.toml` reads. Unknown keys are refused, with the nearest known one. An "
        "empty default means none. A file may begin with `extends = \"other.toml\"` and then says only what "
        "differs. `--set section.key=value` changes one value.",
        section("Top level", c.RunConfig),
        section("[task]", c.TaskConfig),
        section("[data]", c.DataConfig),
        section("[train]", c.TrainConfig),
        section("[method]", c.MethodConfig),
        ["The parameters of each method: [Method parameters](parameters.md).", ""],
        section("[central]", c.LearnerConfig),
        section("[[sites]]", c.SiteConfig),
        ["`count = 10` on a site makes ten equal sites: NAME-1 to NAME-10.", ""],
        section("[central.lora] and [sites.lora]", c.LoraConfig),
        ["A site may also have `[sites.data]`, `[sites.task]`, `[sites.limits]` and `[sites.privacy]`: their keys are "
         "those of [site.toml](site.md).", ""],
        section("[exchange]", c.ExchangeConfig),
        section("[simulation]", c.SimulationConfig),
        section("[report]", c.ReportConfig),
    )  # fmt: skip


def site_file() -> str:
    """Every key of site.toml."""
    from fedstill.common import config as c

    return page(
        "A site's configuration",
        "Every key of `site.toml`, which only the site reads: `flower-client --site site.toml`. Where this file and a "
        "run disagree on data, device or limits, this file wins. Relative paths begin at the file's folder.",
        section("Top level", c.SiteFile),
        section("[data]", c.SiteData),
        section("[limits]", c.LimitsConfig),
        section("[privacy]", c.PrivacyConfig),
        section("[approval]", c.ApprovalConfig),
        section("[task]", c.SiteTask),
        section("[lora]", c.LoraConfig),
    )


# --- the command line ---


def command_line() -> str:
    """Every command with its arguments and options."""
    import typer

    from fedstill.cli import app
    from fedstill.deploy.site.client import app as client

    fedstill, site = typer.main.get_command(app), typer.main.get_command(client)
    return page(
        "Command line",
        "Two programs: `fedstill` for researchers and the coordinator, `flower-client` for a site. `--help` prints the "
        "same text; `fedstill --install-completion` sets up your shell. An error that you can act on is one message "
        "and exit code 1; `FEDSTILL_DEBUG=1` shows the traceback as well.",
        *(_command(("fedstill", name), found) for name, found in fedstill.commands.items()),  # type: ignore[attr-defined]
        _command(("flower-client",), site),
    )


def _command(path: tuple[str, ...], command: Any, level: int = 2) -> list[str]:
    lines = [f"{'#' * level} {' '.join(path)}", "", _plain(command.help or ""), ""]
    inner = [line for name, one in getattr(command, "commands", {}).items() for line in _command((*path, name), one, 3)]
    if inner and not command.invoke_without_command:
        return lines + inner
    params = [one for one in command.params if one.name not in ("install_completion", "show_completion", "help")]
    arguments = [one for one in params if one.param_type_name == "argument"]
    usage = " ".join([*path, *(f"[{m}]" if not one.required else m for one in arguments if (m := _metavar(one)))])
    told = _argument_helps(command)
    rows = [
        [code(_spelled(one)), "required" if one.required else _default(one), _plain(one.help or told.get(one.name, ""))]
        for one in params
    ]
    lines += ["```", usage + (" [OPTIONS]" if len(params) > len(arguments) else ""), "```"]
    return lines + (table(("argument or option", "default", "meaning"), rows) if rows else [""]) + inner


def _argument_helps(command: Any) -> dict[str, str]:
    """What `typer.Argument(help=...)` says; the click object of an argument does not keep it."""
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    return {
        name: getattr(hint.__metadata__[0], "help", "") for name, hint in hints.items() if hasattr(hint, "__metadata__")
    }


def _metavar(one: Any) -> str:
    return str(one.metavar or one.name.upper())


def _spelled(one: Any) -> str:
    if one.param_type_name == "argument":
        return _metavar(one)
    return ", ".join(one.opts) + ("" if one.is_flag else f" {one.metavar or one.type.name.upper()}")


def _default(one: Any) -> str:
    return "" if one.default in (None, False, ()) or getattr(one, "is_flag", False) else code(one.default)


def _plain(text: str) -> str:
    """Without rich's markup; bold words in backticks."""
    return re.sub(r"\[/?[a-z ]+\]", "`", inspect.cleandoc(text))


# --- Python ---


def python() -> str:
    """The public names, by mkdocstrings."""
    import fedstill

    groups = {
        "Run a federation": ("run", "Result", "Classifier"),
        "Configuration": ("load_run", "RunConfig", "ConfigError"),
        "Write a method": ("Method", "Params", "Round", "site_verb", "Shield", "Message", "Ask", "Reply"),
        "Drive a run yourself": ("Federation",),
        "Catalogues": ("METHODS", "TASKS", "Task"),
    }
    named = {name for names in groups.values() for name in names}
    missing = set(fedstill.__all__) - named - {"__version__"}
    assert not missing, f"docs/hooks/reference.py: put {sorted(missing)} into a group"
    parts = []
    for title, names in groups.items():
        parts.append([f"## {title}", ""])
        for name in names:
            parts.append([f"::: {fedstill._HOMES[name]}.{name}", "    options:", "      heading_level: 3", ""])
    intro = (
        "The public names of the package, as in `from fedstill import run`. Each is imported when first used, so "
        "`import fedstill` is quick. Modules below the top level are internal and may move between releases."
    )
    return page("Python API", intro, *parts)


# --- verbs ---


def verbs() -> str:
    """What a site can be asked."""
    from fedstill.strategies import all_verbs

    known = {name: verb for name, verb in sorted(all_verbs().items()) if verb.work.__module__.startswith("fedstill.")}
    rows = [
        [f"[`{name}`](#{_anchor(name)})", ", ".join(verb.leaves) or "nothing", _under_privacy(verb),
         verb.phase or "the current one", "step" if verb.quick else "train"]
        for name, verb in known.items()
    ]  # fmt: skip
    parts = [table(("verb", "what leaves the site", "under `[privacy]`", "phase", "deadline"), rows)]
    for name, verb in known.items():
        where = Path(str(inspect.getsourcefile(verb.work))).resolve().relative_to(ROOT)
        parts.append([f"## {name}", "", f"{verb.about} Declared in `{where}`.", ""])
        for title, kind in (("Ask", verb.message), ("Reply", verb.answer)):
            fields = list(_fields(kind))
            about = inspect.cleandoc(kind.__doc__ or "") if fields else "No content."
            parts.append([f"**{title}:** `{kind.__name__}`. {about}", *(table(FIELDS, fields) if fields else [""])])
    return page(
        "Verbs",
        "A verb is one thing a site can be asked. It is declared once, beside the function that answers it; limits, "
        "costs, deadlines and the check of every Reply follow from that declaration. `limits.leave` in site.toml names "
        "the kinds that may leave, `limits.verbs` the verbs that are answered at all. A site with `[privacy]` answers "
        "only verbs that have a shield, and of their answers only what it names. Quick verbs have "
        "`exchange.step_deadline`, the others `exchange.train_deadline`. Every Reply also carries `seconds`, and a "
        "site with a privacy budget adds `privacy`.",
        *parts,
    )


def _under_privacy(verb: Any) -> str:
    shield = verb.shield
    if shield is None:
        return "refused"
    parts = [*shield.plain, *(f"{one} with noise" for one in (*shield.noised, *shield.charged))]
    parts += [f"{one} after DP-SGD" for one in shield.learned]
    return ", ".join(parts) or ("nothing, after DP-SGD" if shield.after_training else "nothing")


FIELDS = ("field", "travels as", "type", "default", "meaning")


def _fields(kind: type) -> Iterator[list[str]]:
    import dataclasses

    from fedstill.common.wire.typed import form_of

    for field in form_of(kind).fields:  # type: ignore[arg-type]
        ways = {"state": "arrays", "practice": "settings", "facts": "numbers", "fact": "setting"}
        default = (
            "" if field.default is dataclasses.MISSING or not _plain_value(field.default) else shown(field.default)
        )
        names = field.wanted.removesuffix(" or NoneType") if field.kind == "fact" else ""
        need = "required" if field.required else code(default)
        yield [
            code(field.key),
            ways.get(field.kind, field.kind),
            names,
            need,
            sentence(meanings(kind).get(field.name, "")),
        ]


def _plain_value(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple) and value != ()


def _anchor(name: str) -> str:
    return name.replace(".", "")


# --- methods ---


def method_pages() -> dict[str, str]:
    """The page of each method, by the `methods:` line in the front matter of docs/methods/*.md."""
    found = {}
    for path in sorted((DOCS / "methods").glob("*.md")):
        line = re.search(r"\A---\n(?:.*\n)*?methods: \[(.*)\]\n", path.read_text(encoding="utf-8"))
        for name in line.group(1).split(",") if line else ():
            found[name.strip()] = path.name
    return found


def written_meanings(page_name: str) -> dict[str, str]:
    """What a page under docs/methods says of each parameter: the last cell of its rows."""
    found: dict[str, str] = {}
    text = (DOCS / "methods" / page_name).read_text(encoding="utf-8")
    for row in re.findall(r"^\| (?=`)(.*) \|$", text, flags=re.MULTILINE):
        cells = [one.strip() for one in re.split(r"(?<!\\)\|", row)]
        names = re.findall(r"`(\w+)`", " ".join(cells[:2]) if page_name == "flower-rules.md" else cells[0])
        meaning = re.sub(r"[:,] see above$", "", cells[-1])
        found.update(dict.fromkeys(names, re.sub(r"\]\((?=[\w-]+\.md)", "](../methods/", meaning)))
    return found


def parameters() -> str:
    """Every method's parameters with their defaults and presets."""
    from fedstill.strategies import METHODS

    pages, parts = method_pages(), []
    common = {**written_meanings("index.md"), **written_meanings("parameters.md")}
    for name, method in METHODS.items():
        if not method.__module__.startswith("fedstill."):
            continue
        presets = {preset: method.parameters(**values) for preset, values in method.presets.items()}
        own, comments_of, rows = written_meanings(pages[name]), meanings(method.parameters), []
        for key, field in method.parameters.model_fields.items():
            usual = field.get_default(call_default_factory=True)
            values = ["" if getattr(one, key) == usual else code(shown(getattr(one, key))) for one in presets.values()]
            name_in_toml = field.alias or key
            meaning = sentence(own.get(name_in_toml) or comments_of.get(key) or common.get(name_in_toml, ""))
            rows.append([code(name_in_toml), type_name(field.annotation), default_of(field), *values, meaning])
        head = ("parameter", "type", "default", *(f"`{preset}`" for preset in presets), "meaning")
        about = f"{method.paper}. {method.__doc__} [{name} in full](../methods/{pages[name]})."
        parts.append([f"## {name}", "", about, *table(head, rows)])
    return page(
        "Method parameters",
        "The keys of `[method]` beside `name` and `preset`. A preset's column shows the values in which it differs "
        "from the default; a preset without a column has the defaults.",
        *parts,
    )


# --- models and tasks ---


def models_and_tasks() -> str:
    """What is known by name."""
    from fedstill.common.data.tasks import SITE_SETS, TASKS
    from fedstill.common.models.builtin import builtin_models

    models = [
        [code(one.name), one.family, f"{one.parameters:,}", "yes" if one.pretrained else "no", one.description]
        for one in builtin_models()
    ]
    tasks = [[code(one.name), one.title, one.metric, ", ".join(one.labels)] for one in TASKS.values()]
    own = [[code(one.name), one.title, one.kind] for one in SITE_SETS.values()]
    return page(
        "Models and tasks",
        "What is known by name. Any AutoModel name or folder works as a model, and your own files or a hub data set as "
        "a task: see [Tasks and partitions](../TASKS.md).",
        ["## Built-in models", "", "They are made on your machine from a seed, or come with the installation."],
        table(("name", "family", "parameters", "pretrained", "description"), models),
        ["## Tasks"],
        table(("name", "texts", "metric", "labels"), tasks),
        ["## Tasks of a site alone", "", "For runs with `task.name = \"mixed\"`."],
        table(("name", "texts", "kind"), own),
    )  # fmt: skip


# --- events ---


def events() -> str:
    """events.jsonl, line by line."""
    from fedstill.server.events import ALWAYS, EVENTS

    parts = [["## In every line", *table(("field", "meaning"), ([code(k), v] for k, v in ALWAYS.items()))]]
    for name, event in EVENTS.items():
        rows = [[code(key), meaning, ""] for key, meaning in event.fields.items()]
        rows += [[code(key), meaning, "sometimes"] for key, meaning in event.optional.items()]
        parts.append([f"## {name}", "", event.meaning, *table(("field", "meaning", "present"), rows)])
    return page(
        "events.jsonl",
        "Each run appends one JSON object per line to `events.jsonl` in its folder. Progress bars, reports and tests "
        "read this file, and so can your scripts. The schema is declared in `server/events.py`; a test holds it "
        "against the code that writes events.",
        *parts,
    )


PAGES: dict[str, Callable[[], str]] = {
    "reference/configuration.md": configuration,
    "reference/site.md": site_file,
    "reference/cli.md": command_line,
    "reference/python.md": python,
    "reference/parameters.md": parameters,
    "reference/verbs.md": verbs,
    "reference/models-and-tasks.md": models_and_tasks,
    "reference/events.md": events,
}
