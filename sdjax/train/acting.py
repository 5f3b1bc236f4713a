"""Turns verified continuations into extra rows of a step's batch.

The teacher's action at a site becomes a row with the student's plain prompt, in a group of its own; its later turns
become suffix rows, which stay outside the batch because no statistic and no part of the usual loss may see them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sdjax.methods.base import Method, RowBatch, SiteRows
from sdjax.rollout.action_tokens import action_tokens
from sdjax.rollout.continuations import Branch, ContinuationCounts, Continuations, Site, sites_of
from sdjax.rollout.engine import SamplingParams
from sdjax.rollout.episodes import Trajectory, Turn
from sdjax.teacher.counters import TeacherCounters
from sdjax.train.optimize import SuffixRows
from sdjax.train.packing import Sequences
from sdjax.train.rows import Row, append_rows
from sdjax.train.session import Session
from sdjax.train.views import SkillTeacher


@dataclass(frozen=True)
class Extension:
    """The rows and the batch with the teacher's actions appended, its suffix rows if there are any, and metrics.
    ``example``: a prompt that the teacher acted on, for reading."""

    rows: list[Row]
    batch: RowBatch
    suffix: SuffixRows | None
    metrics: dict[str, float]
    example: np.ndarray | None = None


class ActingTeacher:
    """Searches wins for the groups that a method names, and builds the rows that they teach.

    Args:
      method: decides which groups, and how suffix tokens weigh.
      session: plays; the teacher is the policy that its engine holds, with the skill bank in its prompt.
    """

    def __init__(self, method: Method, session: Session):
        config = session.config
        self.method, self.rules = method, method.acting()
        self.tokenizer, self.protocol, self.on_missing = session.tokenizer, session.protocol, config.teacher.on_missing
        self.extra_tokens = config.teacher.privileged_tokens
        self.skills = SkillTeacher(config.teacher, session.tokenizer, config.rollout.prompt_tokens)
        self._counters = TeacherCounters(missing=self.on_missing)
        sampling = SamplingParams(config.rollout.temperature, config.rollout.response_tokens)
        self.continuations = Continuations(session.player, self.rules.search, self._prompt, sampling)

    def _prompt(self, student: Trajectory, prompt: np.ndarray) -> np.ndarray:
        text, general_only = self.skills.text(student.fields)
        built = self.skills.prompt.ids(text, prompt)
        self._counters.add(built, general_only=general_only, name=f"the acting teacher of {student.assignment.task}")
        return built.ids

    def extend(self, trajectories: Sequence[Trajectory], rows: list[Row], batch: RowBatch) -> Extension:
        """``rows`` and ``batch`` are the students'. Without a verified continuation they come back as they are."""
        triggered_N = self.method.triggered(batch)
        groups = sorted(set(batch.group_N[triggered_N].tolist()))
        self._counters = TeacherCounters(missing=self.on_missing)
        branches, counts = self.continuations.search(groups, trajectories)
        metrics = _search_metrics(len(groups), counts, len(branches))
        metrics |= {name.replace("teacher/", "acting/"): value for name, value in self._counters.metrics().items()}
        if not branches:
            return Extension(rows, batch, None, metrics | _row_metrics([], [], None, 0, 0))
        found = [sites_of(branch) for branch in branches.values()]
        place = {(row.trajectory.assignment.trajectory, row.index): i for i, row in enumerate(rows)}
        sites = [s for part, _ in found for s in (_with_rows(site, place) for site in part) if s is not None]
        mismatched = sum(dropped for _, dropped in found)
        suffix_turns = [
            (branch, turn)
            for branch in branches.values()
            for turn in range(_first_site(branch, sites) + 1, len(branch.trajectory.turns))
            if len(branch.trajectory.turns[turn].response)
        ]
        wanted = len(sites) + len(suffix_turns)
        sites = sites[: self.rules.reserve_rows]
        suffix_turns = suffix_turns[: self.rules.reserve_rows - len(sites)]
        extra = [_row(site, batch, number) for number, site in enumerate(sites)]
        new_batch = append_rows(batch, len(rows), extra, self.protocol, self.rules.reserve_rows)
        new_batch = replace(new_batch, sites=self._site_rows(new_batch, rows, sites, place, triggered_N))
        suffix = self._suffix(suffix_turns, sites, batch.mask_NL.shape[1])
        metrics |= _row_metrics(sites, suffix_turns, suffix, mismatched, wanted - len(sites) - len(suffix_turns))
        first = next(iter(branches.values()))
        example = first.trajectory.turns[first.depth].acting_prompt
        return Extension(rows + extra, new_batch, suffix, metrics, example)

    def _site_rows(self, batch: RowBatch, rows, sites: Sequence[Site], place, triggered_N) -> SiteRows:
        """``batch`` has the teacher's rows behind the ``rows`` of the students."""
        n, (N, L) = len(rows), batch.mask_NL.shape
        site_N, teacher_N, triggered, home_N = np.full(N, -1, np.int32), *np.zeros((2, N), bool), batch.group_N.copy()
        triggered[:n] = triggered_N[:n]
        action_NL = np.zeros((N, L), bool)
        for number, site in enumerate(sites):
            own = n + number
            members = [place[t, site.turn] for t in site.students]
            site_N[[own, *members]] = number
            teacher_N[own] = triggered[own] = True
            home_N[own] = site.branch.trajectory.assignment.group
            self._mark(action_NL, own, site.branch.trajectory.turns[site.turn])
            for i in members:
                self._mark(action_NL, i, rows[i].turn)
        return SiteRows(site_N, teacher_N, action_NL, triggered, home_N)

    def _suffix(self, turns: Sequence[tuple[Branch, int]], sites: Sequence[Site], L: int) -> SuffixRows | None:
        """Suffix rows. A turn behind several sites of its branch is one row with the sum of its weights."""
        if not turns:
            return None
        S, K = len(turns), self.rules.suffix_topk
        scope_SL = np.zeros((S, L), bool)
        for i, (branch, turn) in enumerate(turns):
            self._mark(scope_SL, i, branch.trajectory.turns[turn])
        pairs = [
            (number, i)
            for number, site in enumerate(sites)
            for i, (branch, turn) in enumerate(turns)
            if site.branch is branch and site.turn < turn
        ]
        site_E, row_E = np.array(pairs, np.int32).T
        # Padded to the reserve, so that the weights compile once in most steps.
        padding = -len(pairs) % self.rules.reserve_rows
        weight_EL = self.method.suffix_weight(
            np.pad(site_E, (0, padding), constant_values=-1), np.pad(scope_SL[row_E], ((0, padding), (0, 0)))
        )
        weight_SL = np.zeros((S, L), np.float32)
        np.add.at(weight_SL, row_E, weight_EL[: len(pairs)])
        own = [branch.trajectory.turns[turn] for branch, turn in turns]
        return SuffixRows(
            plain=Sequences([t.prompt for t in own], [t.response for t in own]),
            acting=Sequences([_acting_prompt(t) for t in own], [t.response for t in own]),
            home_S=np.array([branch.trajectory.assignment.group for branch, _ in turns], np.int32),
            weight_SL=weight_SL,
            top_ids_SLK=np.zeros((S, L, K), np.int32),
            top_logps_SLK=np.zeros((S, L, K), np.float32),
        )

    def _mark(self, mask_NL: np.ndarray, row: int, turn: Turn) -> None:
        """Sets the tokens in scope of one row."""
        n = len(turn.response)
        mask_NL[row, :n] = self.rules.scope == "response" or action_tokens(turn.response, self.tokenizer.decode)


def _with_rows(site: Site, place: dict[tuple[int, int], int]) -> Site | None:
    """The site with the students that have a row; an answer without tokens is none."""
    students = tuple(t for t in site.students if (t, site.turn) in place)
    answered = len(site.branch.trajectory.turns[site.turn].response) > 0
    return replace(site, students=students) if answered and students else None


def _first_site(branch: Branch, sites: Sequence[Site]) -> int:
    turns = [site.turn for site in sites if site.branch is branch]
    return min(turns, default=len(branch.trajectory.turns))


def _row(site: Site, batch: RowBatch, number: int) -> Row:
    """The teacher's action as a row, with group and trajectory numbers that no student has."""
    trajectory = site.branch.trajectory
    assignment = replace(
        trajectory.assignment,
        group=int(batch.group_N.max()) + 1 + number,
        trajectory=int(batch.trajectory_N.max()) + 1 + number,
    )
    return Row(replace(trajectory, assignment=assignment), trajectory.turns[site.turn], site.turn, extra=True)


def _acting_prompt(turn: Turn) -> np.ndarray:
    assert turn.acting_prompt is not None, "a suffix row is a turn that the teacher played"
    return turn.acting_prompt


def _search_metrics(groups: int, counts: ContinuationCounts, branches: int) -> dict[str, float]:
    return {
        "acting/triggered_groups": float(groups),
        "acting/verified_groups": float(branches),
        "acting/attempts": float(counts.attempts),
        "acting/continuations": float(counts.continuations),
        "acting/verified_frac": counts.verified / max(counts.continuations, 1),
        "acting/diverged_replays": float(counts.diverged),
        "acting/failed_continuations": float(counts.failed),
        "acting/env_steps": float(counts.env_steps),
        "acting/replayed_steps": float(counts.replayed_steps),
        "acting/tokens": float(counts.tokens),
    }


def _row_metrics(sites, suffix_turns, suffix: SuffixRows | None, mismatched: int, overflow: int) -> dict[str, float]:
    students = [len(site.students) for site in sites]
    return {
        "acting/sites": float(len(sites)),
        "acting/students_per_site_mean": float(np.mean(students)) if students else 0.0,
        "acting/mismatched_prompts": float(mismatched),
        "acting/suffix_rows": float(len(suffix_turns)),
        "acting/suffix_tokens": float((suffix.weight_SL > 0).sum()) if suffix is not None else 0.0,
        "acting/overflow_rows": float(overflow),
    }
