"""In a notebook: the tutorials run from top to bottom, and a result shows itself with words that stay words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import fedstill

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs/tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_tutorial_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, 4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "clear the outputs before committing"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [out.data for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs if "data" in out]
    [html] = [data["text/html"] for data in shown if "text/html" in data]
    assert html.count("<polyline") == 4  # three sites and the central model
    assert re.search(r"<td>central</td><td>small-bert</td>", html)
    assert "'label':" in shown[1]["text/plain"]


def test_a_result_shows_its_scores_and_no_markup_of_others(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    site = {"model": hostile, "texts": 5, "alone": None, "after": {"accuracy": 0.625}, "bytes_up": 10, "bytes_down": 20}
    summary = {
        "status": "finished", "method": "fedid", "rounds": 1, "seconds": {"total": 3.0}, "central": {"accuracy": 0.75},
        "central_model": {"model": "tiny-bert"}, "centralized": None, "sites": {hostile: site},
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    rows = ["round,node,accuracy", "0,central,0.5", "1,central,0.75", f"0,{hostile},0.5", f"1,{hostile},0.625"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    html = fedstill.Result(tmp_path)._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    for text in ("0.625", "0.750", "10 B", "fedid, 1 rounds, 3 s; accuracy"):
        assert text in html
    assert html.count("<polyline") == 2
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "reason": hostile}))
    assert "<script" not in fedstill.Result(tmp_path)._repr_html_()
