"""The notebooks run from top to bottom, and are committed without what a run leaves in them."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
    names = ["01_quickstart", "02_configuration", "03_numerics_and_kernels", "04_fusion", "05_mixture_of_experts"]
    names.append("06_loading")
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_without_outputs(path: Path):
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
# The sockets of jupyter_client are closed by its garbage collection, after the notebook has run.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning:zmq")
def test_runs_and_ends_in_a_plot(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its asserts hold (a failing cell raises here) and it draws. The limit is twice what a run may take."""
    monkeypatch.setenv("PYTHONWARNINGS", os.environ.get("PYTHONWARNINGS", "default"))
    notebook = read(path)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})
    ]
    assert pictures
