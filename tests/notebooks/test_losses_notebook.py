"""The notebook of the losses: the pair agrees, the boxes are laid out as they should be, and every cell runs."""

import importlib
import os
from pathlib import Path

import numpy as np
import pytest

from sdjax.train.batch_file import load_batch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "notebooks"


@pytest.fixture
def token_boxes(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return importlib.import_module("token_boxes")


def cells(name: str) -> list[tuple[str, str]]:
    jupytext = pytest.importorskip("jupytext")
    return [(cell.cell_type, cell.source) for cell in jupytext.read(FOLDER / name).cells]


def test_notebook_and_text_pair_are_the_same():
    assert cells("losses.ipynb") == cells("losses.py")


def test_shipped_outputs_hold_every_figure_and_no_error_or_path():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(FOLDER / "losses.ipynb", as_version=4)
    assert figures(notebook) == 10
    text = (FOLDER / "losses.ipynb").read_text(encoding="utf-8")
    assert str(ROOT) not in text and "/home/" not in text and "Traceback" not in text
    assert (FOLDER / "losses.ipynb").stat().st_size < 2_000_000


def test_shipped_batch_is_small_and_has_something_to_show():
    assert (FOLDER / "batch.npz").stat().st_size < 1_000_000
    saved = load_batch(FOLDER / "batch.npz")
    b = saved.batch
    assert {"skills", "future_full", "future_ablated"} <= set(b.views)
    assert (b.adv_N[b.ok_N] > 0).any() and (b.adv_N[b.ok_N] < 0).any()
    assert [len(row) for row in saved.tokens] == b.mask_NL.sum(1).tolist()
    assert all(np.isfinite(view_NL[b.mask_NL]).all() for view_NL in b.views.values())


def test_boxes_follow_each_other_and_break_at_the_edge(token_boxes):
    turns = [["ab", " c", "\n"], ["x" * 12] * 3]
    boxes, starts = token_boxes.layout(turns, columns=token_boxes.layout([["a"]])[0][0].column + 25)
    first = boxes[0].column
    assert starts == [0, 1]
    assert [(b.text, b.line, b.column - first) for b in boxes] == [
        ("ab", 0, 0), ("·c", 0, 2), ("⏎", 0, 4), ("x" * 12, 1, 0), ("x" * 12, 1, 12), ("x" * 12, 2, 0),
    ]  # fmt: skip


def test_colours_follow_the_values(token_boxes):
    figure = token_boxes.token_boxes(
        [["a", "b", "c"]], [np.array([-1.0, 0.0, 3.0])], ["turn"], title="t", colorbar="nats", center=0.0
    )
    red, white, blue = (patch.get_facecolor() for patch in figure.axes[0].patches)
    assert red[0] > red[2] and blue[2] > blue[0]
    assert min(white[:3]) > 0.95
    assert [t.get_text() for t in figure.axes[0].texts] == ["a", "b", "c", "turn"]


def test_a_value_is_needed_for_every_token(token_boxes):
    with pytest.raises(ValueError, match="zip"):
        token_boxes.token_boxes([["a", "b"]], [np.array([1.0])], ["turn"], title="t", colorbar="")


@pytest.mark.slow
def test_every_cell_runs(monkeypatch):
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = jupytext.read(FOLDER / "losses.py")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    assert figures(notebook) == 10
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "SYNTHETIC" not in printed and "nan" not in printed


def figures(notebook) -> int:
    return sum("image/png" in o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", []))
