"""A model plays: that of ``model.path``, of a finished warm start, or the newest checkpoint of a run."""

from dataclasses import replace
from pathlib import Path

from sdjax.config import RunConfig
from sdjax.envs.base import Environment, Observation
from sdjax.envs.prompts import project
from sdjax.evaluate.evaluation import sampling_for
from sdjax.play.agents import Move
from sdjax.rollout.engine import Request
from sdjax.seeds import derive_seed
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.session import Session, open_session
from sdjax.train.teacher_weights import TeacherWeights
from sdjax.train.update import Updater

_SLOTS = 8  # one episode at a time needs no more, and this still divides over the devices of one host


class Checkpoint:
    """Plays with the weights that the session's engine holds, as validation does."""

    def __init__(self, session: Session):
        self._session = session
        config = session.config
        self._sampling = sampling_for(config.eval.temperature, config.rollout.response_tokens)
        self._task, self._seed = "", 0

    async def begin(self, environment: Environment, task: str, seed: int) -> None:
        self._task, self._seed = task, seed

    async def act(self, observation: Observation, past: list[tuple[str, str]]) -> Move | None:
        session = self._session
        prompt, _ = session.player.prompt(observation, past, self._task)
        seed = derive_seed(self._seed, "play/answer", task=self._task, turn=len(past))
        completion = await session.engine.generate(Request(prompt, seed, self._sampling, f"play {self._task}"))
        answer = session.tokenizer.decode(completion.tokens)
        projection = project(answer, session.template)
        return Move(projection.action, answer, projection.reason or "")


def open_newest(config: RunConfig, workdir: Path | None) -> tuple[Session, str]:
    """A session that holds the newest weights of the run in ``workdir``, and where they come from.

    Without a run there, the weights are those of ``model.path``. The run directory is only read, so the run may go on.

    Raises:
      ModelError, DataError, CheckpointError: what is missing or does not fit.
    """
    rollout = replace(
        config.rollout,
        slots=min(config.rollout.slots, _SLOTS),
        prefill_rows=min(config.rollout.prefill_rows, _SLOTS),
    )
    config = replace(config, rollout=rollout)
    finished = None if workdir is None else workdir / "model"
    if finished is not None and (finished / "config.json").is_file():
        config = replace(config, model=replace(config.model, path=str(finished)))
        return open_session(config), str(finished)
    session = open_session(config)
    folder = None if workdir is None else (workdir / "checkpoints").absolute()
    if folder is None or not folder.is_dir():
        return session, config.model.path
    try:
        return session, _restore_newest(session, folder)
    except BaseException:
        session.close()
        raise


def _restore_newest(session: Session, folder: Path) -> str:
    config = session.config
    checkpoints = Checkpoints(folder, keep=config.save.keep, asynchronous=False)
    try:
        saved = checkpoints.steps()
        if not saved:
            return config.model.path
        method = config.method.build()
        # A checkpoint is read whole, in the form in which training saved it.
        updater = Updater(
            session.model, method, config.train, config.rollout.temperature, session.tokenizer.sampling_mask_V
        )
        kind = method.teacher_weights if config.teacher.weights == "method" else config.teacher.weights
        weights = TeacherWeights(kind, config.teacher.ema_decay)
        weights.start(session.params)
        params = checkpoints.restore(saved[-1], weights.join(updater.init(session.params)))["params"]
    finally:
        checkpoints.close()
    session.engine.update_weights(params, saved[-1])
    return f"{folder / str(saved[-1])} (after {saved[-1]} updates)"
