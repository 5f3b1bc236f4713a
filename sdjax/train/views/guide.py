"""The view "guide": what the policy itself advises after it has read all episodes of a group.

Groups with a success and a failure only. The policy writes a reflection on each episode and then merges them; every
draw has a seed of its own, so that a resumed run writes the same guides.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from sdjax.errors import ConfigError
from sdjax.rollout.engine import Request, SamplingParams
from sdjax.rollout.episodes import Trajectory
from sdjax.seeds import derive_seed
from sdjax.teacher import views as texts
from sdjax.teacher.prompt import TeacherIds
from sdjax.train.rows import Row
from sdjax.train.views.base import ViewContext, groups_of, trajectory_text


class GuideView:
    names: ClassVar[tuple[str, ...]] = ("guide",)

    def __init__(self, context: ViewContext):
        self._context = context
        self._prompt = context.teacher_prompt()
        self._guides: dict[int, str] = {}

    def prepare(self, rows: Sequence[Row], step: int) -> tuple[np.ndarray, dict[str, float]]:
        config, contrast = self._context.config, {}
        for number, members in groups_of(rows).items():
            labels, has_contrast = texts.reflection_labels(
                [trajectory_text(m) for m in members], graded=self._context.graded, spread=config.contrast_spread
            )
            if has_contrast:
                contrast[number] = (members, labels)
        written = asyncio.run(self._write_all(list(contrast.values()), step))
        self._guides = dict(zip(contrast, written))
        guides = [g for g in written if g]
        metrics = {
            "contrast_groups": float(len(contrast)),
            "guides": float(len(guides)),
            "guide_failures": float(len(contrast) - len(guides)),
        }
        if guides:
            metrics["guide_chars_mean"] = float(np.mean([len(g) for g in guides]))
        return np.array([bool(self.text(row)) for row in rows]), metrics

    def prompts(self, row: Row) -> tuple[TeacherIds, ...]:
        return (self._prompt.ids(self.text(row), row.turn.prompt),)

    def text(self, row: Row) -> str:
        return texts.guide_text(self._guides.get(row.trajectory.assignment.group, ""))

    def general_only(self, row: Row) -> bool:
        return False

    async def _write_all(self, groups: Sequence[tuple[list[Trajectory], tuple[bool, ...]]], step: int) -> list[str]:
        # gather, because it raises the first error itself and not a group of errors.
        return await asyncio.gather(*(self._write(members, labels, step) for members, labels in groups))

    async def _write(self, members: list[Trajectory], labels: tuple[bool, ...], step: int) -> str:
        """The guide of one group, "" if the policy wrote nothing that could be used."""
        written = await asyncio.gather(*(self._reflect(m, label, step) for m, label in zip(members, labels)))
        reflections = [(text, label) for text, label in zip(written, labels) if text]
        if {label for _, label in reflections} != {True, False}:
            return ""
        first = members[0]
        task = trajectory_text(first).task
        longest = max(len(text) for text, _ in reflections)
        prompt = self._fit(
            longest, lambda chars: texts.merge_prompt(task, [(t[:chars] or ".", label) for t, label in reflections])
        )
        return await self._ask(prompt, "merge", first, step)

    async def _reflect(self, member: Trajectory, label: bool, step: int) -> str:
        config, episode = self._context.config, trajectory_text(member)
        prompt = self._fit(
            min(config.reflection_turns, len(member.turns)),
            lambda turns: texts.reflection_prompt(
                episode, label, turns=turns, observation_chars=config.reflection_observation_chars
            ),
        )
        return await self._ask(prompt, "reflect", member, step)

    async def _ask(self, prompt: np.ndarray, purpose: str, member: Trajectory, step: int) -> str:
        context, assignment = self._context, member.assignment
        sample = assignment.sample if purpose == "reflect" else 0
        seed = derive_seed(context.run_seed, purpose, step=step, task=assignment.task, sample=sample)
        sampling = SamplingParams(context.temperature, context.config.reflection_tokens)
        name = f"{purpose} {assignment.task} sample {sample}"
        completion = await context.engine.generate(Request(prompt, seed, sampling, name))
        return texts.written_text(context.tokenizer.decode(completion.tokens))

    def _fit(self, size: int, render: Callable[[int], str]) -> np.ndarray:
        """Prompt ids of ``render(size)``, with the largest size that leaves room for the answer.

        Raises:
          ConfigError: even size 0 does not fit.
        """
        context = self._context
        limit = context.max_length - context.config.reflection_tokens

        def ids(size: int) -> np.ndarray:
            return np.asarray(context.tokenizer.render_chat(render(size)), np.int32)

        best = ids(size)
        if len(best) <= limit:
            return best
        low, high, best = 0, size, ids(0)  # size low fits, size high does not
        if len(best) > limit:
            raise ConfigError(
                f"a prompt for a reflection or guide has at least {len(best)} tokens; rollout.max_length = "
                f"{context.max_length} less teacher.reflection_tokens leaves {limit}.",
                "raise rollout.max_length or lower teacher.reflection_tokens.",
            )
        while high - low > 1:
            middle = (low + high) // 2
            trial = ids(middle)
            if len(trial) <= limit:
                low, best = middle, trial
            else:
                high = middle
        return best
