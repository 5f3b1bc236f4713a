"""An acting teacher plays on from states that failed episodes reached; only what it wins is used (methods.md, 6.6).

A state is restored by reset and replay, and every observation of the replay is compared with the recorded one: a
continuation never starts from a state that the students were not in. The teacher sees privileged text, the rows that
come out of it do not: they keep the plain prompt.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from sdjax.errors import CompletionLost, EnvError
from sdjax.rollout import prefix_tree
from sdjax.rollout.engine import SamplingParams
from sdjax.rollout.episodes import Assignment, Player, Trajectory, Turn
from sdjax.rollout.prefix_tree import Node, Path

# (a student's trajectory, its plain prompt) -> the prompt with privileged text in it.
Acting = Callable[[Trajectory, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ContinuationRules:
    """How to search for a win in a group of failures.

    continuations: played from each state. nodes: states tried in one group. support: episodes that must share a state.
    fallback_depth: where no state but the root is shared, all states up to this depth may be used.
    """

    continuations: int = 2
    nodes: int = 3
    support: int = 2
    fallback_depth: int = 4


@dataclass
class ContinuationCounts:
    """What the search did and what it cost. attempts: states tried. diverged: replays that showed something else.
    failed: continuations that no environment could play. env_steps: turns of the teacher; replayed_steps: turns that
    only restored."""

    attempts: int = 0
    continuations: int = 0
    diverged: int = 0
    failed: int = 0
    verified: int = 0
    env_steps: int = 0
    replayed_steps: int = 0
    tokens: int = 0

    def add(self, other: "ContinuationCounts") -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(frozen=True)
class Branch:
    """A verified continuation. ``trajectory`` is the whole episode: ``depth`` replayed turns, then the teacher's.
    ``covered``: the failed episodes that were in the state where the teacher took over."""

    trajectory: Trajectory
    depth: int
    covered: tuple[Trajectory, ...]


@dataclass(frozen=True)
class Site:
    """One action of the teacher and what the students did in the same state under the token-identical prompt.

    turn: number of the turn. students: trajectory numbers.
    """

    branch: Branch
    turn: int
    students: tuple[int, ...]


def path_of(trajectory: Trajectory) -> Path:
    return Path(
        tuple(turn.observation.text for turn in trajectory.turns), tuple(turn.action for turn in trajectory.turns)
    )


def sites_of(branch: Branch) -> tuple[list[Site], int]:
    """Sites of a branch by turn, and how many divergences were dropped because the prompts are not the same tokens."""
    teacher = path_of(branch.trajectory)
    students: dict[int, list[int]] = {}
    dropped = 0
    for trajectory in branch.covered:
        turn = prefix_tree.first_divergence(path_of(trajectory), teacher)
        if turn is None:
            continue
        if not np.array_equal(trajectory.turns[turn].prompt, branch.trajectory.turns[turn].prompt):
            dropped += 1
            continue
        students.setdefault(turn, []).append(trajectory.assignment.trajectory)
    return [Site(branch, turn, tuple(members)) for turn, members in sorted(students.items())], dropped


class Continuations:
    """Searches verified continuations.

    Args:
      player: plays the turns. rules: the search. acting: makes the teacher's prompt. sampling: as in the rollout.
    """

    def __init__(self, player: Player, rules: ContinuationRules, acting: Acting, sampling: SamplingParams):
        self.player, self.rules, self.acting, self.sampling = player, rules, acting, sampling

    def search(
        self, groups: Iterable[int], trajectories: Sequence[Trajectory]
    ) -> tuple[dict[int, Branch], ContinuationCounts]:
        """At most one branch for each of ``groups``, all groups at the same time; the result depends on seeds alone.

        Raises:
          SdjaxError: anything but a failure of an environment or of one completion, which is a failed continuation.
        """
        wanted = sorted(set(groups))
        members: Mapping[int, list[Trajectory]] = {g: [] for g in wanted}
        for trajectory in trajectories:
            if trajectory.assignment.group in members and trajectory.error is None:
                members[trajectory.assignment.group].append(trajectory)

        async def everything():
            return await asyncio.gather(*(self._group(members[g]) for g in wanted))

        counts, branches = ContinuationCounts(), {}
        for group, (branch, part) in zip(wanted, asyncio.run(everything())):
            counts.add(part)
            if branch is not None:
                branches[group] = branch
        return branches, counts

    async def _group(self, failures: Sequence[Trajectory]) -> tuple[Branch | None, ContinuationCounts]:
        """Tries one state after the other and stops at the first verified branch."""
        rules, counts = self.rules, ContinuationCounts()
        tree = prefix_tree.build([path_of(t) for t in failures])
        nodes = prefix_tree.eligible(tree, support=rules.support, fallback_depth=rules.fallback_depth)
        for attempt, node in enumerate(prefix_tree.schedule(nodes, rules.nodes)):
            counts.attempts += 1
            played = await asyncio.gather(
                *(self._continue(failures, node, attempt, k, counts) for k in range(rules.continuations))
            )
            won = [t for t in played if t is not None and t.success]
            counts.verified += len(won)
            if won:
                return Branch(won[0], node.depth, tuple(failures[i] for i in node.members)), counts
        return None, counts

    async def _continue(
        self, failures: Sequence[Trajectory], node: Node, attempt: int, number: int, counts: ContinuationCounts
    ) -> Trajectory | None:
        """One continuation from ``node``, on a fresh environment after each failure. None: it was not played."""
        counts.continuations += 1
        student = failures[node.members[0]]
        # The group belongs into the seed: the same task may have been drawn twice in one step.
        assignment = replace(
            student.assignment,
            purpose=f"{student.assignment.purpose}/teacher/{student.assignment.group}/{attempt}",
            sample=number,
        )
        for _ in range(self.player.retries + 1):
            environment = self.player.benchmark.make()
            try:
                return await self._play(environment, student, node.depth, assignment, counts)
            except (EnvError, CompletionLost):
                continue
            finally:
                await environment.close()
        counts.failed += 1
        return None

    async def _play(
        self, environment, student: Trajectory, depth: int, assignment: Assignment, counts: ContinuationCounts
    ) -> Trajectory | None:
        earlier: tuple[Turn, ...] = student.turns[:depth]
        actions = [turn.action for turn in earlier]
        seen = await environment.restore(assignment.task, student.env_seed, actions)
        counts.replayed_steps += depth
        if seen != [turn.observation for turn in student.turns[: depth + 1]]:
            counts.diverged += 1
            return None
        played = await self.player.play_on(
            environment,
            seen[-1],
            earlier,
            assignment,
            self.sampling,
            student.env_seed,
            lambda prompt: self.acting(student, prompt),
        )
        own = played.turns[depth:]
        counts.env_steps += len(own)
        counts.tokens += sum(len(turn.response) for turn in own)
        return played
