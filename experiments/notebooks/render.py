"""Runs the text form of the notebook and writes ``losses.ipynb`` with its outputs.

python -m experiments.notebooks.render
"""

import os
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def main() -> None:
    # The kernel works in the notebook's folder and must find the package of this checkout.
    root = str(FOLDER.parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    notebook = jupytext.read(FOLDER / "losses.py")
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # random ids and times would change the file at every run
        cell.metadata.pop("execution", None)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, FOLDER / "losses.ipynb")


if __name__ == "__main__":
    main()
