"""Configuration of ScienceWorld."""

from dataclasses import dataclass

from sdjax.errors import ConfigError

_BASE_MB, _EPISODE_MB = 300, 16  # measured: 80 episodes in 1 GB


@dataclass(frozen=True)
class ScienceworldConfig:
    """The ``env.scienceworld`` part of a run's configuration.

    simplification: ``""`` (none, as the panels have it), ``"easy"``, or names of the simulator joined by commas:
    teleportAction, selfWateringFlowerPots, openContainers, openDoors, noElectricalAction. Stored gold paths belong to
    one simplification; those that ship belong to ``""``.
    task_names: the task types that the splits train, train_gold, dev and test hold; empty: all 30. Panels are not
    affected.
    failed_return: return of an episode that fails (score -100, usually a wrong ``focus on``). ``"zero"``: what was
    earned is lost, R = max(score, 0) / 10. ``"keep"``: it is kept. The reported score is 0 either way.
    failed_penalty: reward units (10 = success) taken off the return of a failed episode as well.
    expert_score: the least score (0 to 100) with which the gold expert is worth imitating. 100: only episodes that
    succeed within the turn budget. Less: gold paths that need more turns are cut behind their last gain in the budget.
    heap_mb: heap of the Java process of one worker. It needs 300 MB, and 16 MB for each episode that the worker plays
    at once; more episodes are refused. Java may come to use all of it, and about 200 MB besides.
    restarts: how often one episode survives the death of its worker; it is replayed then. One more is an EnvError.
    """

    simplification: str = ""
    task_names: tuple[str, ...] = ()
    failed_return: str = "zero"
    failed_penalty: float = 0.0
    expert_score: int = 100
    heap_mb: int = 2048
    restarts: int = 1

    def check(self) -> None:
        """Raises ConfigError if a value has no meaning. ``store.Tasks`` checks simplification and task names."""
        if self.failed_return not in ("zero", "keep"):
            raise ConfigError(f"env.scienceworld.failed_return = {self.failed_return!r}.", "use zero or keep.")
        if not 0 <= self.expert_score <= 100:
            raise ConfigError(f"env.scienceworld.expert_score = {self.expert_score}.", "use a score from 0 to 100.")
        if self.failed_penalty < 0 or self.restarts < 0:
            raise ConfigError(
                f"env.scienceworld.failed_penalty = {self.failed_penalty}, restarts = {self.restarts}.",
                "use no negative number.",
            )
        if episodes_in_heap(self.heap_mb) < 1:
            raise ConfigError(
                f"env.scienceworld.heap_mb = {self.heap_mb} holds no episode.", f"use {_BASE_MB + _EPISODE_MB} or more."
            )


def episodes_in_heap(heap_mb: int) -> int:
    """How many episodes a Java process with this memory limit can play at once."""
    return (heap_mb - _BASE_MB) // _EPISODE_MB
