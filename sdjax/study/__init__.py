"""Whole studies: a grid of cells as data, its manifest, where it stands, running it, its report.

A study file (``experiments/study.py``) needs only what is exported here.
"""

from sdjax.study.grid import Grid, axis, chain, prod, rule, settings

__all__ = ["Grid", "axis", "chain", "prod", "rule", "settings"]
