"""The training loop. It knows no method: a method says what it needs and what its advantages and loss are.

One global step: draw tasks, play episodes, score rows (old, reference, teacher), advantages, mini-batch updates, hand
the new weights to the engine; then validation, checkpoint and one line of metrics. Checkpoint k is the state after k
updates.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from sdjax import interrupt, jsonl
from sdjax.config import RunConfig, resolved
from sdjax.errors import CheckpointError, EngineError, SdjaxError
from sdjax.evaluate import evaluation
from sdjax.interrupt import Interrupted
from sdjax.methods.base import Advantages, RowBatch
from sdjax.rollout.engine import SamplingParams
from sdjax.rollout.episodes import Assignment, Trajectory, play_all
from sdjax.seeds import derive_seed
from sdjax.train import batch_file, distributed, engine_gap, rundir, session, transcripts
from sdjax.train.acting import ActingTeacher
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.ledger import NET, Ledger
from sdjax.train.optimize import Optimizer, SuffixRows, learning_rate
from sdjax.train.packing import Sequences
from sdjax.train.progress import Progress
from sdjax.train.rows import Row, make_batch, make_rows, rollout_metrics
from sdjax.train.rundir import RunDir
from sdjax.train.teacher_pass import Teacher
from sdjax.train.teacher_weights import TeacherWeights
from sdjax.train.update import Updater
from sdjax.train.validation import Validation


@dataclass(frozen=True)
class StepData:
    """What the rollout of one step produced; ``_score`` fills the log-probabilities of the batch in."""

    trajectories: list[Trajectory]
    rows: list[Row]
    batch: RowBatch
    sequences: Sequences
    suffix: SuffixRows | None = None


@dataclass(frozen=True)
class Completed:
    """What is done so far: ``step`` updates with their record, and the ledger's totals up to there.

    validated: False between the last update and its validation.
    """

    step: int
    record: dict[str, Any]
    totals: dict[str, float]
    validated: bool


def draw_tasks(task_ids: tuple[str, ...], per_step: int, step: int, seed: int) -> list[str]:
    """Tasks of global step ``step`` (from 1): a new seeded permutation for every pass over the training split."""
    n = len(task_ids)
    drawn = []
    for place in range((step - 1) * per_step, step * per_step):
        epoch, index = divmod(place, n)
        order = np.random.default_rng(derive_seed(seed, "tasks", step=epoch)).permutation(n)
        drawn.append(task_ids[order[index]])
    return drawn


class Trainer:
    """One run in one directory. ``run`` trains from the newest checkpoint (or from the start) to the last step.

    Args:
      config: the run.
      directory: an open run directory.
      console: where progress is shown.
    """

    def __init__(self, config: RunConfig, directory: RunDir, console: Console):
        self.config, self.directory, self.console = config, directory, console
        plain = resolved(config)
        distributed.agree("configuration", json.dumps(plain, sort_keys=True), timeout_s=distributed.MEETING_S)
        directory.write_config(plain)
        directory.clear_failure()
        attempt, self.log_folder = directory.new_attempt()
        self.ledger = Ledger(devices=config.mesh.data * config.mesh.fsdp * config.mesh.tensor, attempt=attempt)
        with directory.recording_failure():
            self.session = session.open_session(config, self.log_folder)
        rundir.write_json(
            directory.path / "provenance.json", rundir.provenance(plain, session.provenance(self.session))
        )
        self.method = config.method.build()
        self.updater = Updater(
            self.session.model,
            self.method,
            config.train,
            config.rollout.temperature,
            self.session.tokenizer.sampling_mask_V,
        )
        self.optimizer = Optimizer(self.updater, config.train, self.session.mesh)
        self.teacher = Teacher(self.method, self.session) if self.method.views else None
        kind = self.method.teacher_weights if config.teacher.weights == "method" else config.teacher.weights
        self.teacher_weights = TeacherWeights(kind, config.teacher.ema_decay)
        self.actor = ActingTeacher(self.method, self.session) if self.method.acts else None
        self.checkpoints = Checkpoints(
            directory.checkpoints, keep=config.save.keep, asynchronous=config.save.asynchronous
        )
        self.validation = Validation(
            self.session, directory, (*self.method.extra_validations, *config.eval.extra_validations)
        )
        self.train_tasks = self.session.benchmark.task_ids(config.env.train_split)
        self.state: Any = None
        self.first_step = 1
        self._completed: Completed | None = None
        self._saved = -1  # step of the newest checkpoint

    def run(self) -> None:
        """Trains, evaluates and marks the run done.

        Raises:
          Interrupted: a signal asked for the end; what was completed is saved.
          SdjaxError: with the boundary that failed.
        """
        try:
            self._start()
            with Progress(self.console, self.config.name, self.config.train.steps, self.first_step - 1) as progress:
                for step in range(self.first_step, self.config.train.steps + 1):
                    if number := distributed.interruption():
                        raise Interrupted(number)
                    self._step(step, progress)
                self.checkpoints.wait()
                self.final_evaluation(progress)
            rundir.write_json(self.directory.done, {"step": self.config.train.steps, "seconds": self.ledger.totals})
        except Interrupted:
            self._keep_completed()
            raise
        except SdjaxError as error:
            self.directory.fail(error)
            raise
        finally:
            self.close()

    def close(self) -> None:
        self.ledger.close()
        self.session.close()
        self.checkpoints.close()

    def _start(self) -> None:
        """Restores the newest checkpoint, or validates and saves step 0."""
        state = self.updater.init(self.session.params)
        self.teacher_weights.start(self.session.params)
        saved = self.checkpoints.steps()
        if saved:
            last = saved[-1]
            progress = self.checkpoints.progress(last)
            like = self.checkpoints.abstract(self.teacher_weights.join(state))
            del state  # beside the restored one it would be twice the memory
            self.state = self.teacher_weights.split(self.checkpoints.restore(last, like))
            # Restored a second time even if ``last`` is 0: updates donate the buffers of the state.
            self.session.reference.set(self.checkpoints.restore(0, like)["params"])
            self.directory.trim(last)
            self.ledger.totals |= progress["ledger"]
            self.first_step, self._saved = last + 1, last
            self.session.engine.update_weights(self.state["params"], last)
            self.console.print(f"{self.config.name}: going on after update {last}")
            self.ledger.begin()
            self._complete_record(last, progress)
            return
        self.directory.trim(-1)
        self.state = state
        self.ledger.begin()
        with Progress(self.console, self.config.name, self.config.train.steps, 0) as progress:
            record = self._validate(0, progress)
            self._finish_step(0, record, force_save=True)

    def _complete_record(self, step: int, saved: dict[str, Any]) -> None:
        """The process may have ended between a checkpoint and its metrics line: the checkpoint carries a copy.

        If it was interrupted between an update and its validation, the copy lacks the validation, which is played now.
        """
        self._completed = Completed(step, saved["record"], dict(self.ledger.totals), saved["validated"])
        if any(r["step"] == step for r in jsonl.read(self.directory.metrics)):
            self._completed = dataclasses.replace(self._completed, validated=True)
        elif saved["validated"]:
            jsonl.append(self.directory.metrics, [saved["record"]])
        else:
            with Progress(self.console, self.config.name, self.config.train.steps, step) as progress:
                self._finish_step(step, saved["record"] | self._validate(step, progress))

    def _keep_completed(self) -> None:
        """Saves what was completed since the newest checkpoint. What was under way is lost time: it is done again."""
        done = self._completed
        if done is None:
            return
        if done.step > self._saved:
            self._save(done)
        self.checkpoints.wait()
        _, lines = self.ledger.close_step(done.step + done.validated)
        lost = {"validation"} if not done.validated else {line["phase"] for line in lines}
        jsonl.append(
            self.directory.ledger,
            [{**r, "phase": "lost", "lost_phase": r["phase"]} if r["phase"] in lost else r for r in lines],
        )

    def _save(self, done: Completed) -> None:
        progress = {"step": done.step, "ledger": done.totals, "record": done.record, "validated": done.validated}
        self.checkpoints.save(done.step, self.teacher_weights.join(self.state), progress)
        self._saved = done.step

    def _step(self, step: int, progress: Progress) -> None:
        data, record = self._rollout(step, progress)
        interrupt.check()
        if self.actor is not None:
            data, record_acting = self._act(self.actor, step, data, progress)
            record |= record_acting
        data, adv, record_scores = self._score(step, data, progress)
        record |= record_scores
        interrupt.check()
        progress.phase("update")
        with self.ledger.phase("update"):
            self.session.engine.sleep()
            coefficients = self.method.coefficients(step, self.config.train.steps)
            self.state, metrics = self.optimizer.update(
                self.state,
                data.batch,
                adv.adv_NL,
                data.sequences,
                coefficients,
                step=step,
                seed=self.config.seed,
                learning_rate=learning_rate(self.config.train, step),
                suffix=data.suffix,
            )
            self.teacher_weights.update(self.state["params"])
        record |= metrics
        with self.ledger.phase("sync"):
            self.session.engine.update_weights(self.state["params"], step)
        if step % self.config.eval.every == 0 or step == self.config.train.steps:
            base = {"step": step, "attempt": self.ledger.attempt}
            self._completed = Completed(step, {**base, **record}, self.ledger.running_totals(), validated=False)
            record |= self._validate(step, progress)
        self._finish_step(step, record)
        progress.step_done(step, record)

    def _rollout(self, step: int, progress: Progress) -> tuple[StepData, dict[str, float]]:
        train, rollout = self.config.train, self.config.rollout
        tasks = draw_tasks(self.train_tasks, train.tasks_per_step, step, self.config.seed)
        assignments = [
            Assignment(task=task, group=g, trajectory=g * train.group_size + k, sample=k, purpose="train", step=step)
            for g, task in enumerate(tasks)
            for k in range(train.group_size)
        ]
        progress.phase("rollout", len(assignments))
        stats = self.session.engine.stats
        before = dataclasses.replace(stats, extra=dict(stats.extra))
        with self.ledger.phase("rollout"):
            trajectories = play_all(
                self.session.player,
                assignments,
                SamplingParams(rollout.temperature, rollout.response_tokens),
                progress.episode_done,
            )
        rows = make_rows(trajectories)
        self._agree(step, "episodes", rows)
        if not rows:
            raise EngineError(
                f"step {step}: none of {len(assignments)} episodes could be played; first error: "
                f"{trajectories[0].error}",
                "see the error; nothing was trained, start again after mending it.",
            )
        batch = make_batch(rows, self.session.protocol, rollout.response_tokens, train)
        record = rollout_metrics(trajectories, rows, batch)
        record |= {
            "engine/prompt_tokens": float(stats.prompt_tokens - before.prompt_tokens),
            "engine/prefill_tokens": float(stats.prefill_tokens - before.prefill_tokens),
            "engine/decode_tokens": float(stats.decode_tokens - before.decode_tokens),
            "engine/decode_steps": float(stats.decode_steps - before.decode_steps),
            "cost/engine_s": stats.seconds - before.seconds,
            "engine/weight_version": float(rows[0].turn.weight_version),
        }
        record |= {f"engine/{key}": float(value - before.extra[key]) for key, value in stats.extra.items()}
        if record["rollout/cloned_groups"]:
            self.console.print(
                f"[red]step {step}: all samples of {record['rollout/cloned_groups']:.0f} groups are the same tokens, "
                "which chance does not explain: the engine gives them one seed"
            )
        sequences = Sequences([r.turn.prompt for r in rows], [r.turn.response for r in rows])
        return StepData(trajectories, rows, batch, sequences), record

    def _agree(self, step: int, what: str, rows: list[Row]) -> None:
        """All processes of a run must train on the same rows; an environment that differs would go unnoticed."""
        if distributed.several():
            lines = [[row.trajectory.ret, row.turn.prompt.tolist(), row.turn.response.tolist()] for row in rows]
            distributed.agree(f"{what} of step {step}", json.dumps(lines), timeout_s=distributed.MEETING_S)

    def _act(
        self, actor: ActingTeacher, step: int, data: StepData, progress: Progress
    ) -> tuple[StepData, dict[str, float]]:
        """Lets the teacher play on from failures, and adds the rows that come out of it."""
        progress.phase("teacher")
        start = time.perf_counter()
        with self.ledger.phase("teacher"):
            extended = actor.extend(data.trajectories, data.rows, data.batch)
            suffix = extended.suffix
            if suffix is not None:
                suffix = self.optimizer.top(self.state["params"], suffix, extra_tokens=actor.extra_tokens)
        path = self.directory.path / "teacher_prompt_acting.txt"
        if extended.example is not None and not path.exists():
            path.write_text(self.session.tokenizer.decode(extended.example, skip_special=False), encoding="utf-8")
        rows = extended.rows
        self._agree(step, "continuations", rows)
        sequences = Sequences([r.turn.prompt for r in rows], [r.turn.response for r in rows])
        data = dataclasses.replace(data, rows=rows, batch=extended.batch, sequences=sequences, suffix=suffix)
        return data, extended.metrics | {"cost/acting_s": round(time.perf_counter() - start, 6)}

    def _score(self, step: int, data: StepData, progress: Progress) -> tuple[StepData, Advantages, dict[str, float]]:
        """Fills old, reference and teacher log-probabilities in, and computes the method's advantages."""
        shape = data.batch.mask_NL.shape
        progress.phase("score")
        with self.ledger.phase("score"):
            old_NL = self.optimizer.score(self.state["params"], data.sequences, shape)
            reference_NL = self.optimizer.score(self.session.reference.on_device(), data.sequences, shape)
        record = engine_gap.measure(data.rows, old_NL, self.config.rollout, step)
        if record["engine/logp_gap_abs_mean"] > self.config.rollout.warn_gap:
            gap, limit = record["engine/logp_gap_abs_mean"], self.config.rollout.warn_gap
            self.console.print(f"[yellow]step {step}: engine/trainer log-prob gap {gap:.3g} > {limit}")
        weight_NL, weighted = engine_gap.weights(data.rows, old_NL, data.batch.mask_NL, self.config.train)
        record |= weighted
        batch = dataclasses.replace(data.batch, old_NL=old_NL, reference_NL=reference_NL, engine_weight_NL=weight_NL)
        if self.teacher is not None:
            progress.phase("teacher")
            with self.ledger.phase("teacher"):
                context, metrics = self.teacher.prepare(data.rows, len(batch.ok_N), step)
                batch = dataclasses.replace(batch, context=context)
                params = self.teacher_weights.current(self.state["params"], self.session.reference)
                selected_N = self.method.select(batch)
                views, scored = self.teacher.score(self.optimizer, params, data.rows, batch, selected_N)
            batch = dataclasses.replace(batch, views=views)
            record |= metrics | scored
            self._save_prompts(data.rows)
        with self.ledger.phase("update"):
            adv = self.method.advantages(batch, step, self.config.train.steps)
        record |= {f"method/{k}": v for k, v in adv.metrics.items()}
        data = dataclasses.replace(data, batch=batch)
        self._save_transcripts(step, data, adv)
        return data, adv, record

    def _save_prompts(self, rows: list[Row]) -> None:
        """The first rendered teacher prompt of each kind, for reading."""
        assert self.teacher is not None
        paths = {name: self.directory.path / f"teacher_prompt_{name}.txt" for name in self.teacher.names}
        if not all(path.exists() for path in paths.values()):
            for name, text in self.teacher.examples(rows).items():
                if not paths[name].exists():
                    paths[name].write_text(text, encoding="utf-8")

    def _save_transcripts(self, step: int, data: StepData, adv: Advantages) -> None:
        rollout = self.config.rollout
        if step != 1 and step % rollout.transcripts_every:
            return
        weight = adv.weight_NL
        if weight is None and self.method.weight_name:
            fields = {"old": data.batch.old_NL, "adv": adv.adv_NL, **data.batch.views}
            found = self.updater.token_weight(data.batch.old_NL, fields, data.batch.mask_NL)
            weight = None if found is None else np.asarray(found)
        value = transcripts.build(
            [row for row in data.rows if not row.extra],  # extra rows stand behind the others
            data.batch,
            adv.adv_NL,
            weight,
            self.method,
            self.teacher,
            self.session.tokenizer,
            step=step,
            episodes=rollout.transcript_episodes,
        )
        rundir.write_json(self.directory.transcripts(step), value)
        token_texts = [self.session.tokenizer.token_strings(row.turn.response) for row in data.rows]
        batch_file.save_batch(
            self.directory.batch(step), data.batch, adv.adv_NL, token_texts, step=step, method=self.method.name
        )

    def _validate(self, step: int, progress: Progress) -> dict[str, float]:
        with self.ledger.phase("validation"):
            summary = self.validation.run(step, progress)
            progress.validated(step, summary)
            params = self.state["params"]
            teacher = lambda: self.teacher_weights.current(params, self.session.reference)  # noqa: E731
            extra = self.validation.run_extra(step, progress, params, teacher, summary)
        return summary | extra

    def final_evaluation(self, progress: Progress) -> None:
        """K rollout seeds on the panel with the last weights; seeds whose file is complete are skipped."""
        config, panel = self.config, self.session.panel
        sampling = evaluation.sampling_for(config.eval.final_temperature, config.rollout.response_tokens)
        for seed in missing_seeds(config, self.directory, len(panel.task_ids), panel.sha256):
            if self.directory.final(seed).exists():
                self.console.print(f"{config.name}: {self.directory.final(seed)} is not whole and is played again")
            progress.phase(f"final evaluation, seed {seed}", len(self.session.panel.task_ids))
            played = evaluation.evaluate(
                self.session.player,
                self.session.panel,
                sampling,
                purpose="final",
                seed_index=seed,
                on_done=progress.episode_done,
            )
            lines = evaluation.records(played, self.session.panel, step=config.train.steps, seed_index=seed)
            evaluation.write(self.directory.final(seed), lines)

    def _finish_step(self, step: int, record: dict[str, Any], *, force_save: bool = False) -> None:
        """Saves if due, closes the ledger's step and writes the metrics line."""
        config = self.config
        record = {"step": step, "attempt": self.ledger.attempt, **record}
        if step != self._saved and (force_save or step % config.save.every == 0 or step == config.train.steps):
            with self.ledger.phase("save"):
                self._save(Completed(step, record, self.ledger.running_totals(), validated=True))
        seconds, lines = self.ledger.close_step(step)
        times = {f"time/{phase}_s": round(value, 6) for phase, value in seconds.items()}
        times["time/step_s"] = round(sum(seconds.values()), 6)
        hours = self.ledger.devices / 3600
        totals = self.ledger.totals
        costs = {
            "cost/net_s": round(self.ledger.net_seconds(), 6),
            "cost/net_gpu_h": sum(totals[p] for p in NET) * hours,
            "cost/val_gpu_h": totals["validation"] * hours,
            "cost/save_gpu_h": totals["save"] * hours,
        }
        jsonl.append(self.directory.ledger, lines)
        jsonl.append(self.directory.metrics, [{**record, **times, **costs}])
        self._completed = Completed(step, record, dict(totals), validated=True)


def missing_seeds(config: RunConfig, directory: RunDir, tasks: int, panel_sha: str) -> list[int]:
    """Rollout seeds of the final evaluation whose file is not there, or not complete."""
    return [
        seed
        for seed in range(config.eval.final_seeds)
        if not evaluation.is_complete(directory.final(seed), tasks=tasks, panel_sha=panel_sha, step=config.train.steps)
    ]


def evaluate_only(config: RunConfig, directory: RunDir, console: Console) -> None:
    """The final evaluation on the last checkpoint of a run: an idempotent job of its own. Nothing is loaded if it is
    complete.

    Raises:
      CheckpointError: the run is not trained to its last step; its files would be taken for final scores.
    """
    last = config.train.steps
    directory.write_config(resolved(config))
    panel = rundir.read_provenance(directory.path).get("panel")
    if panel and not missing_seeds(config, directory, panel["tasks"], panel["sha256"]):
        console.print(f"{config.name}: the final evaluation is complete; nothing to do.")
        return
    # Before anything of the run is touched: a run that failed stays marked as failed.
    saved = sorted(int(path.name) for path in directory.checkpoints.glob("*") if path.name.isdigit())
    if last not in saved:
        raise CheckpointError(
            f"{directory.path} has no checkpoint of step {last} (it has {', '.join(map(str, saved)) or 'none'}).",
            "finish the training with --mode=train first.",
        )
    trainer = Trainer(config, directory, console)
    try:
        trainer.teacher_weights.start(trainer.session.params)
        like = trainer.teacher_weights.join(trainer.updater.init(trainer.session.params))
        params = trainer.checkpoints.restore(last, like)["params"]
        trainer.session.engine.update_weights(params, last)
        with Progress(console, config.name, config.train.steps, config.train.steps) as progress:
            trainer.final_evaluation(progress)
    finally:
        trainer.close()
