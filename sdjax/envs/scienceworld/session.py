"""One episode in a worker process, which outlives the process: the simulator is deterministic, so a lost episode is
replayed on a fresh one and compared with what was seen before."""

from typing import Any

from sdjax.envs.base import Status
from sdjax.envs.workers import WorkerPool
from sdjax.errors import EnvError


class ReplayedSession:
    """``restarts``: how often this episode was replayed so far; at most ``limit`` times, then EnvError."""

    def __init__(self, pool: WorkerPool, limit: int):
        self._pool = pool
        self._limit = limit
        self._session = pool.session()
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._answers: list[dict[str, Any]] = []
        self.restarts = 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls ``method`` (``reset`` first, then ``step``) and returns the simulator's answer.

        Raises:
          EnvError: the simulator refused; or the worker was lost once too often; or the replay gave other answers.
        """
        try:
            answer = await self._session.call(method, **params)
        except EnvError as error:
            if self.restarts >= self._limit:
                raise
            self.restarts += 1
            await self._replay(error)
            answer = await self._session.call(method, **params)
        _raise_refusal(answer)
        self._calls.append((method, params))
        self._answers.append(answer)
        return answer

    async def _replay(self, cause: EnvError) -> None:
        await self._session.close()
        self._session = self._pool.session()
        for (method, params), before in zip(self._calls, self._answers, strict=True):
            again = await self._session.call(method, **params)
            _raise_refusal(again)
            if again != before:
                differing = sorted(key for key in before if again.get(key) != before[key])
                raise EnvError(
                    f"after {cause.found!r} the replay of the episode differs in {', '.join(differing)} at call "
                    f"{method} {params}.",
                    "report the task and its commands; play the episode again from its start.",
                ) from cause

    async def close(self) -> None:
        await self._session.close()


def status_of(answer: dict[str, Any]) -> Status:
    """Status after an answer of the simulator. Success is score 100 and nothing else."""
    if answer["score"] < 0:
        return Status.FAILED
    if not answer["completed"]:
        return Status.RUNNING
    return Status.SUCCESS if answer["score"] == 100 else Status.FAILED


def goal_sentences(progress: str) -> list[str]:
    """The simulator's table of goals (number, reached, class, description) as sentences, in its order."""
    rows = [line.split("\t") for line in progress.splitlines()]
    return [f"{'done' if row[1] == 'true' else 'open'}: {row[-1].strip()}" for row in rows if len(row) >= 4]


def _raise_refusal(answer: dict[str, Any]) -> None:
    if "refused" in answer:
        raise EnvError(answer["refused"], answer["fix"])
