"""Take each guard out once, in a copy of the tree, and see its tests fail: `make test-mutants`.

A test that passes without the guard that it is about is blind, and a mutant that survives says so. mutants.toml lists
the guards; a text that is not found, or that stands there twice, is an error too, so that the list cannot rot.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
LEFT = shutil.ignore_patterns("__pycache__", ".*cache", "*.pyc")
PASSING = {"runs", "build", "dist", "site"}  # folders of the checkout that no test reads
SECONDS = 240  # a guard that keeps something from hanging, taken out, makes its test hang


@dataclass(frozen=True)
class Mutant:
    """A guard, how it is taken out, and the tests that must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


class Rotten(Exception):
    """A mutant that fits the code no more; the text says which."""


def copied(tree: Path) -> Path:
    """Copy the checkout, without its history and environment, and make sure that the copy is what is imported."""
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.name in PASSING or path.name.startswith(".") or path.suffix == ".egg-info":
            continue
        if path.is_dir():
            shutil.copytree(path, tree / path.name, ignore=LEFT, symlinks=True)
        else:
            shutil.copy2(path, tree / path.name)
    for name in (".github", ".dockerignore", ".gitignore"):
        if (ROOT / name).exists():
            (tree / name).symlink_to(ROOT / name)
    program = "import fedstill.server.exchange as one, fedstill.cli as two; print(one.__file__, two.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tree, env=environment(tree), capture_output=True,
                          text=True, check=True)  # fmt: skip
    if not all(Path(place).is_relative_to(tree) for place in done.stdout.split()):
        raise Rotten(f"the copy in {tree} is not what Python imports, but {done.stdout}")
    return tree


def environment(tree: Path) -> dict[str, str]:
    """Python's path begins at the copy; no bytecode is kept, which would be taken for that of a mutant as old."""
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def broken(tree: Path, tests: list[str], quick: bool) -> tuple[set[str], str]:
    """Run tests in the copy; return those that failed, by the ids that were given, and the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--timeout", str(SECONDS),
               "--no-header", "--tb=line", *(["-x"] if quick else []), *tests]  # fmt: skip
    done = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode not in (0, 1) or re.search(r"^ERROR tests/", done.stdout, re.MULTILINE):
        raise Rotten(f"the tests cannot run:\n{text[-3000:]}")
    failed = re.findall(r"^FAILED (\S+::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return {
        test for test in tests if any(one.startswith((f"{test}[", f"{test}::")) or one == test for one in failed)
    }, text


@contextmanager
def without_guard(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Take the guard out of the copy, and put it back."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.old) != 1:
        raise Rotten(f"{mutant.file} has `{mutant.old.strip()[:80]}` {text.count(mutant.old)} times, not once")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        compile(path.read_text(encoding="utf-8"), mutant.file, "exec")
        yield
    except SyntaxError as error:
        raise Rotten(f"{mutant.file} cannot be read without the guard: {error}") from None
    finally:
        path.write_text(text, encoding="utf-8")


def tried(mutant: Mutant, trees: SimpleQueue[Path]) -> tuple[Mutant, str, float]:
    """Try a mutant in a tree that is free; return what came of it, and its seconds."""
    tree, began = trees.get(), time.monotonic()
    try:
        with without_guard(tree, mutant):
            failed, _ = broken(tree, mutant.tests, quick=len(mutant.tests) == 1)
        blind = sorted(set(mutant.tests) - failed)
        verdict = f"SURVIVED {', '.join(blind)}" if blind else "killed"
    except Rotten as error:
        verdict = f"ROTTEN {error}"
    finally:
        trees.put(tree)
    return mutant, verdict, time.monotonic() - began


def main() -> int:
    """Try every mutant; return 1 if one survives or fits no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="try only mutants whose names hold this")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, each in a copy of its own")
    options = parser.parse_args()
    only, jobs = options.only, options.jobs
    mutants = [Mutant(**one) for one in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]]
    mutants = [mutant for mutant in mutants if only in mutant.name]
    began, wrong = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            trees.put(copied(Path(folder) / f"tree-{number}"))
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        tree = trees.get()
        failed, text = broken(tree, tests, quick=False)
        trees.put(tree)
        if failed:
            print(text[-4000:], f"\nThese fail as the code is: {', '.join(sorted(failed))}")
            return 1
        print(f"{len(tests)} tests pass with every guard, after {time.monotonic() - began:.0f} s", flush=True)
        with ThreadPoolExecutor(jobs) as pool:
            for number, (mutant, verdict, seconds) in enumerate(pool.map(tried, mutants, repeat(trees)), 1):
                if verdict != "killed":
                    wrong.append(mutant.name)
                print(f"{number:3} {seconds:5.1f} s  {mutant.name}: {verdict}", flush=True)
    print(f"{len(mutants) - len(wrong)} of {len(mutants)} mutants killed in {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
