"""Warm start: supervised fine-tuning on expert episodes, in the prompts and answer format of the run.

A normal feature for small models, whose random or general-purpose policy never wins a game. The result is an ordinary
Hugging Face directory (``WORKDIR/model``), the ``model.path`` of later runs.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from sdjax import jsonl
from sdjax.config import RunConfig, resolved
from sdjax.envs.demos import chat_turns, draw, play_experts
from sdjax.errors import ConfigError, DataError, SdjaxError
from sdjax.evaluate import evaluation
from sdjax.interrupt import Interrupted
from sdjax.losses.masked import masked_sum
from sdjax.models import save_checkpoint
from sdjax.seeds import derive_seed
from sdjax.train import distributed, rundir, session
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.ledger import Ledger
from sdjax.train.optimize import Optimizer
from sdjax.train.packing import Sequences
from sdjax.train.progress import Progress
from sdjax.train.rundir import RunDir
from sdjax.train.teacher_pass import SkillTeacher
from sdjax.train.update import Updater


def expert_rows(run: session.Session, console: Console) -> Sequences:
    """Prompts and answers of expert episodes on the training split, turn by turn.

    A seeded share of the episodes (``sft.privileged_share``) carries the skill bank's text in front and has no noise.
    """
    config, sft, tokenizer = run.config, run.config.sft, run.tokenizer
    teacher = None
    if sft.privileged_share > 0:
        teacher = SkillTeacher(config.teacher, tokenizer, config.rollout.prompt_tokens)
    stop = np.asarray([tokenizer.turn_end_id], np.int32)
    task_ids = run.benchmark.task_ids(config.env.train_split)
    rng = np.random.default_rng(derive_seed(config.seed, "sft/rows"))
    # One draw an episode, so that the share does not change which episodes are played.
    privileged = [teacher is not None and rng.random() < sft.privileged_share for _ in range(sft.episodes)]
    drawn = draw(task_ids, sft.episodes, config.seed, sft.noise)
    wanted = [replace(one, noise=0.0) if reads else one for one, reads in zip(drawn, privileged)]
    episodes = play_experts(run.benchmark, wanted, sft.expert, config.env.turns)
    prompts, responses = [], []
    for demonstration, reads, turns in zip(wanted, privileged, episodes):
        for chat in chat_turns(turns, run.template):
            ids = np.asarray(tokenizer.render_chat(chat.prompt), np.int32)
            if teacher is not None and reads:
                ids = teacher.prompt.ids(teacher.text(run.benchmark.fields(demonstration.task))[0], ids).ids
            prompts.append(ids)
            responses.append(np.concatenate([np.asarray(tokenizer.encode(chat.answer), np.int32), stop]))
    if not prompts:
        raise DataError(
            f"the expert won none of {sft.episodes} episodes within {config.env.turns} turns.",
            "raise env.turns or sft.episodes, or choose another sft.expert.",
        )
    console.print(f"warm start: {sft.episodes} expert episodes, {len(prompts)} rows")
    return Sequences(prompts, responses)


class WarmStart:
    """One warm-start run. ``run`` continues from the newest checkpoint and ends with ``WORKDIR/model``."""

    def __init__(self, config: RunConfig, directory: RunDir, console: Console):
        if config.sft.steps < 1:
            raise ConfigError(f"sft.steps = {config.sft.steps}.", "use a positive number of updates.")
        self.config, self.directory, self.console = config, directory, console
        directory.write_config(resolved(config))
        directory.clear_failure()
        attempt, _ = directory.new_attempt()
        self.ledger = Ledger(devices=1, attempt=attempt)
        with directory.recording_failure():
            self.session = session.open_session(config)
        self.updater = Updater(
            self.session.model, config.method.build(), config.train, 1.0, self.session.tokenizer.sampling_mask_V
        )
        self.optimizer = Optimizer(self.updater, config.train, self.session.mesh)
        self.checkpoints = Checkpoints(directory.checkpoints, keep=1, asynchronous=config.save.asynchronous)
        self._gradient = jax.jit(self._add_gradient, donate_argnums=(1,))

    def run(self) -> None:
        try:
            self._train()
        except Interrupted:
            raise
        except SdjaxError as error:
            self.directory.fail(error)
            raise
        finally:
            self.ledger.close()
            self.session.close()
            self.checkpoints.close()

    def _train(self) -> None:
        config, sft = self.config, self.config.sft
        state = self.updater.init(self.session.params)
        first, saved = 1, self.checkpoints.steps()
        if saved:
            state, first = self.checkpoints.restore(saved[-1], state), saved[-1] + 1
        self.directory.trim(first - 1)
        rows = expert_rows(self.session, self.console) if first <= sft.steps else Sequences([], [])
        self.ledger.begin()
        with Progress(self.console, config.name, sft.steps, first - 1) as progress:
            for step in range(first, sft.steps + 1):
                with self.ledger.phase("update"):
                    state, record = self._update(state, rows, step)
                asked = distributed.interruption()
                if step % 100 == 0 or step == sft.steps or asked:
                    with self.ledger.phase("save"):
                        self.checkpoints.save(step, state, {"step": step})
                seconds, lines = self.ledger.close_step(step)
                times = {f"time/{k}_s": round(v, 6) for k, v in seconds.items()}
                jsonl.append(self.directory.metrics, [{"step": step, **record, **times}])
                jsonl.append(self.directory.ledger, lines)
                progress.sft_step(step, record["sft/loss"])
                if asked:
                    raise Interrupted(asked)
            self._finish(state, progress)

    def _update(self, state: Any, rows: Sequences, step: int) -> tuple[Any, dict[str, float]]:
        sft = self.config.sft
        members = sorted({int(i) for i in self._members(len(rows.responses), step)})
        tokens = sum(len(rows.responses[i]) for i in members)
        grads = jax.tree.map(jnp.zeros_like, state["params"])
        total = 0.0
        extra = self.config.teacher.privileged_tokens if sft.privileged_share > 0 else 0
        for p in self.optimizer.pack(rows, members, extra):
            batch = self.optimizer.put(p.device_arrays())
            grads, loss = self._gradient(state["params"], grads, batch, jnp.float32(1 / tokens))
            total += float(loss)
        warm = min(1.0, step / max(sft.warmup_steps, 1))
        rate = sft.learning_rate * warm * (1 - (step - 1) / sft.steps)
        state, norm = self.updater.apply(state, grads, jnp.float32(rate))
        return state, {"sft/loss": total, "optim/lr": rate, "optim/grad_norm": float(norm)}

    def _members(self, n: int, step: int) -> np.ndarray:
        """Rows of one update: a new seeded permutation for every pass, a function of the step, so that resuming
        agrees.
        """
        size = self.config.sft.batch_rows
        places = np.arange((step - 1) * size, step * size)
        orders = {
            epoch: np.random.default_rng(derive_seed(self.config.seed, "sft/order", step=epoch)).permutation(n)
            for epoch in {int(e) for e in places // n}
        }
        return np.array([orders[int(place) // n][place % n] for place in places])

    def _add_gradient(self, params, accumulated, batch, scale):
        def function(stats, _, scale):
            return -scale * masked_sum(stats.logp, stats.mask), None

        (loss, _), grads = self.updater.loss_and_gradient(params, batch, function, (), scale)
        return jax.tree.map(jnp.add, accumulated, grads), loss

    def _finish(self, state: Any, progress: Progress) -> None:
        """Validates the result and writes it as a Hugging Face directory."""
        config, run = self.config, self.session
        run.engine.update_weights(state["params"], config.sft.steps)
        progress.phase("validation", len(run.panel.task_ids))
        sampling = evaluation.sampling_for(config.eval.temperature, config.rollout.response_tokens)
        played = evaluation.evaluate(
            run.player, run.panel, sampling, purpose="validation", on_done=progress.episode_done
        )
        lines = evaluation.records(played, run.panel, step=config.sft.steps, seed_index=0)
        evaluation.write(self.directory.validation(config.sft.steps), lines)
        progress.validated(config.sft.steps, evaluation.summary(lines))
        out = self.directory.path / "model"
        save_checkpoint(out, run.model, state["params"], tokenizer_from=run.checkpoint_dir)
        rundir.write_json(self.directory.done, {"step": config.sft.steps, "model": "model"})
        self.console.print(f"warm start written to {out}")
