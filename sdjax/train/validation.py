"""Validation during training: on the fixed panel, without privileged context, and now and then in other ways too.

The further validations say what one number hides: a policy can collapse under greedy decoding while its samples hold,
or the other way round; and a teacher that is no better than its student has nothing to teach.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sdjax.config import EXTRA_VALIDATIONS
from sdjax.evaluate import evaluation
from sdjax.train.progress import Progress
from sdjax.train.rundir import RunDir
from sdjax.train.session import Session

SAMPLED_TEMPERATURE = 0.4  # where the usual validation is greedy


class Validation:
    """Args:
    session: plays the panel. directory: where the episodes go. extra: names of further validations; those that would
    repeat the usual decoding are left out.
    """

    def __init__(self, session: Session, directory: RunDir, extra: Sequence[str]):
        self.session, self.directory = session, directory
        config = session.config.eval
        usual = "greedy" if config.temperature == 0 else "sampled"
        self.extra = tuple(name for name in EXTRA_VALIDATIONS if name in extra and name != usual)

    def run(self, step: int, progress: Progress) -> dict[str, float]:
        """The usual validation after ``step`` updates."""
        progress.phase("validation", len(self.session.panel.task_ids))
        return self._play(step, progress, self.session.config.eval.temperature, "")

    def run_extra(
        self, step: int, progress: Progress, params: Any, teacher: Callable[[], Any], usual: dict[str, float]
    ) -> dict[str, float]:
        """The further validations of this step. ``params`` are what the engine holds; ``teacher`` gives the weights
        that score under privileged prompts. Names: ``val_<name>/success``, ...; the teacher's lead over the student's
        success ``usual``.
        """
        config, found = self.session.config.eval, {}
        every = config.extra_every
        if not self.extra or step == 0 or (step % every and step != self.session.config.train.steps):
            return found
        for name in self.extra:
            progress.phase(f"validation, {name}", len(self.session.panel.task_ids))
            if name == "teacher_weights":
                self._use(teacher(), step)
            decoding = {"greedy": 0.0, "sampled": SAMPLED_TEMPERATURE}.get(name, config.temperature)
            summary = self._play(step, progress, decoding, name)
            found |= {key.replace("val/", f"val_{name}/", 1): value for key, value in summary.items()}
            if name == "teacher_weights":
                self._use(params, step)
                found["val_teacher_weights/minus_student"] = summary["val/success"] - usual["val/success"]
        return found

    def _use(self, params: Any, step: int) -> None:
        self.session.engine.update_weights(params, step)

    def _play(self, step: int, progress: Progress, temperature: float, kind: str) -> dict[str, float]:
        session = self.session
        sampling = evaluation.sampling_for(temperature, session.config.rollout.response_tokens)
        played = evaluation.evaluate(
            session.player, session.panel, sampling, purpose="validation", on_done=progress.episode_done
        )
        lines = evaluation.records(played, session.panel, step=step, seed_index=0)
        evaluation.write(self.directory.validation(step, kind), lines)
        return evaluation.summary(lines)
