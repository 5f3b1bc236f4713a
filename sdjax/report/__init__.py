"""Evaluation report: run directories in, one self-contained HTML file out. Reads files only."""

from sdjax.report.html import build_report
from sdjax.report.load import find_runs, load_run, load_runs
from sdjax.report.records import Run

__all__ = ["Run", "build_report", "find_runs", "load_run", "load_runs"]
