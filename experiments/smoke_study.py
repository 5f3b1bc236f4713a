"""The whole study in small: 13 methods x 4 environments = 52 runs of two updates, on two CPU cores, and their report.

    ./launch/smoke_study

The tiny model first imitates experts for a moment in each environment (4 warm starts); the 13 cells of an environment
begin there. Scores mean nothing here: it shows that every part of a study works on this machine. ScienceWorld's cells
are "not runnable" where there is no Java.
"""

from experiments.study import DATA, METHODS
from sdjax.study import Grid, axis, prod, settings


def get_config():
    points = prod(axis("env", *DATA), axis("model", "smoke"), axis("method", *METHODS["all13"]))
    grid = Grid(points, config="experiments/smoke.py:{env},{method}", warm_start="experiments/smoke.py:{env},grpo")
    return settings("smoke", grid)
