"""No table tests the small built-in models on film reviews that they were distilled on."""

import ast
from collections.abc import Iterator
from pathlib import Path

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.data.splits import make_splits
from fedstill.common.data.tasks import film_reviews
from fedstill.experiments.compare.table_file import find_tables, read_tables
from fedstill.experiments.pretraining.texts import left_out

ROOT = Path(__file__).resolve().parents[3] / "experiments"


def runs() -> Iterator[tuple[str, RunConfig]]:
    """The demo, the benchmark of overlapped rounds, and every row and seed of all tables."""
    yield "demo", load_run(ROOT / "demo.toml")
    script = ast.parse((ROOT / "bench" / "pipeline.py").read_text(encoding="utf-8"))  # to import it changes the process
    texts = [
        one.value for one in script.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "LEARNED"
    ]
    yield "bench-pipeline", load_run(str(ast.literal_eval(texts[0])).replace("METHOD", "fedid"))
    for folder in sorted({file.parent for file in ROOT.rglob("*.toml")} - {ROOT, ROOT / "bench"}):
        for file in find_tables(folder):
            for table in read_tables(file):
                for row in table.rows:
                    yield from ((table.name, table.config(row, seed)) for seed in table.settings.seeds)


def test_no_table_tests_small_models_on_texts_of_their_pretraining() -> None:
    pools, apart = film_reviews(), left_out()
    tested: dict[str, set[str]] = {}  # by seed and settings, most of which are those of many rows
    names = set()
    for name, config in runs():
        models = {config.central.model, *(site.model for site in config.sites)}
        if config.task.name != "film-reviews" or not any(model.startswith("small-") for model in models):
            continue
        names.add(name)
        data = config.data.model_dump_json(include={"test", "test_seed", "test_alpha", "domains", "domain_pool"})
        seed = config.seed if config.data.test_seed is None else "any"
        if (key := f"{data} {seed}") not in tested:
            tested[key] = set(map(str, make_splits(pools, config.data, config.seed).test.texts))
        assert len(tested[key] - apart) == 0, name
    assert {"demo", "bench-pipeline", "screen-methods-film-mild", "screen-constant-film-strong"} <= names
