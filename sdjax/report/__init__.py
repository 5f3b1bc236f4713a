"""Evaluation report: run directories and metrics logs in, one self-contained HTML file out. Reads files only.

`sdjax.report.compare.compare` sets two runs side by side in the terminal.
"""

from sdjax.report.html import build_report
from sdjax.report.load import find_runs, load_run, load_runs
from sdjax.report.records import Run

__all__ = ["Run", "build_report", "find_runs", "load_run", "load_runs"]
