"""No-gradient scoring passes and the mini-batch updates of one global step, over packed micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sdjax import sharding
from sdjax.config import TrainConfig
from sdjax.methods.base import Coefficients, RowBatch
from sdjax.models.cudnn import MAX_SEGMENTS
from sdjax.seeds import derive_seed
from sdjax.train.packing import Packed, Sequences, Shape, pack
from sdjax.train.shared_prefix import divide
from sdjax.train.update import Scales, Updater

_EPS = 1e-8  # of the token mean, methods.md section 3.6


@dataclass(frozen=True)
class SuffixRows:
    """Turns of an acting teacher that only teach its distribution. S rows, L response tokens, K top tokens.

    plain: with the student's prompt, as they are trained. acting: with the prompt that the teacher acted on. home_S:
    group next to whose rows a row is trained. weight_SL: weights that sum to one over the whole global step.
    top_ids_SLK, top_logps_SLK: the teacher's likeliest tokens, filled in by ``Optimizer.top``.
    """

    plain: Sequences
    acting: Sequences
    home_S: np.ndarray
    weight_SL: np.ndarray
    top_ids_SLK: np.ndarray
    top_logps_SLK: np.ndarray

    def __len__(self) -> int:
        return len(self.home_S)


class Optimizer:
    """Runs compiled functions over a step's rows.

    Args:
      updater: the compiled functions.
      train: the ``train`` config.
      mesh: where packed batches are placed.
    """

    def __init__(self, updater: Updater, train: TrainConfig, mesh: Mesh):
        self.updater, self.train, self.mesh = updater, train, mesh
        self._batch = sharding.batch_sharding(mesh)

    def put(self, arrays: Any) -> Any:
        """Moves packed host arrays to the devices, rows split over the data axes."""
        return jax.tree.map(lambda x: sharding.put(x, self._batch), arrays)

    def _shape(self, extra_tokens: int = 0) -> Shape:
        # One segment less than the kernel allows: padding is one too.
        train = self.train
        return Shape(train.pack_rows, train.pack_length + extra_tokens, train.loss_slots, MAX_SEGMENTS - 1)

    def pack(self, sequences: Sequences, rows: Sequence[int], extra_tokens: int = 0) -> list[Packed]:
        return pack(sequences, rows, self._shape(extra_tokens))

    def score(
        self,
        params: Any,
        sequences: Sequences,
        shape: tuple[int, int],
        *,
        extra_tokens: int = 0,
        shared: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Log-probabilities [N, L] of all responses under ``params``; 0 where there is no token.

        ``extra_tokens`` lengthens the packed rows, for prompts that carry privileged text. ``shared``: leading tokens
        of each prompt that other rows may have too; they are processed once where the model can do that.
        """
        out = np.zeros(shape, np.float32)
        blocks, rest = [], range(len(sequences.responses))
        if shared is not None and self.updater.model.shares_prefixes:
            bucket = max(32, -(-extra_tokens // (8 * 32)) * 32)  # an eighth of the extra tokens, in whole 32
            blocks, rest = divide(sequences, shared, self._shape(), bucket)
        packed = self.pack(sequences, rest, extra_tokens)
        # Dispatch everything before the first result is fetched, so that the device never waits for the host.
        results = [self.updater.score(params, self.put(p.device_arrays())) for p in packed]
        for block in blocks:
            tokens, length = self.put((block.tokens_FP, block.length_F))
            cache = self.updater.prefix(params, tokens, length)
            for p, index_B in block.batches:
                batch, index = self.put((p.device_arrays(), index_B))
                results.append(self.updater.score_behind(params, batch, cache, length, index))
                packed.append(p)
        for p, logps in zip(packed, jax.device_get(results)):
            p.scatter(logps, out)
        return out

    def top(self, params: Any, suffix: SuffixRows, *, extra_tokens: int) -> SuffixRows:
        """Fills in what ``params`` find likeliest under the acting prompt."""
        ids, logps = np.zeros_like(suffix.top_ids_SLK), np.zeros_like(suffix.top_logps_SLK)
        packed = self.pack(suffix.acting, range(len(suffix)), extra_tokens)
        results = [self.updater.top_logps(params, self.put(p.device_arrays()), k=ids.shape[-1]) for p in packed]
        for p, (top_ids, top_logps) in zip(packed, jax.device_get(results)):
            p.scatter(top_ids, ids)
            p.scatter(top_logps, logps)
        return replace(suffix, top_ids_SLK=ids, top_logps_SLK=logps)

    def update(
        self,
        state: Any,
        batch: RowBatch,
        adv_NL: np.ndarray,
        sequences: Sequences,
        coefficients: Coefficients,
        *,
        step: int,
        seed: int,
        learning_rate: float,
        on_minibatch: Callable[[], None] = lambda: None,
        suffix: SuffixRows | None = None,
    ) -> tuple[Any, dict[str, float]]:
        """One epoch over mini-batches, one optimizer step each.

        Returns the new state and token means of all metrics.
        """
        totals: dict[str, float] = {}
        norms, losses = [], []
        fields = {"old": batch.old_NL, "reference": batch.reference_NL, "adv": adv_NL, **batch.views}
        if batch.engine_weight_NL is not None:
            fields["engine_weight"] = batch.engine_weight_NL
        auxiliary_NL = self.updater.method.auxiliary_mask(batch)
        if auxiliary_NL is not None:
            fields["auxiliary_mask"] = auxiliary_NL
        empty = 0
        n = len(sequences.responses)
        suffix_totals: dict[str, float] = {}
        for members in minibatches(n, self.train, seed, step, _homes(batch, n, suffix)):
            rows = members[members < n]
            if self._is_empty(coefficients, auxiliary_NL, rows):
                empty += 1
                continue
            grads = jax.tree.map(jnp.zeros_like, state["params"])
            loss = 0.0
            slices = list(self._slices(rows))
            for part in slices:
                scales = self._scales(batch, part, coefficients, len(slices), auxiliary_NL)
                grads, sums = self._accumulate(state["params"], grads, part, batch, fields, sequences, scales)
                loss += sums.pop("loss")
                add_sums(totals, sums)
            if suffix is not None and len(rows) < len(members):
                tail = members[members >= n] - n
                grads, sums = self._accumulate_suffix(state["params"], grads, tail, suffix, coefficients.suffix)
                loss += coefficients.suffix * sums["loss"]
                add_sums(suffix_totals, sums)
            state, norm = self.updater.apply(state, grads, np.float32(learning_rate))
            norms.append(float(norm))
            losses.append(loss)
            on_minibatch()
        metrics = token_means(totals)
        metrics |= {
            "train/loss_total": float(np.mean(losses)) if losses else 0.0,
            "optim/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "optim/grad_norm_max": float(np.max(norms)) if norms else 0.0,
            "optim/updates": float(len(norms)),
            "optim/skipped_updates": float(state["skipped"]),
            "optim/empty_minibatches": float(empty),
            "optim/entropy_coef": self._entropy(coefficients),
            "optim/lr": learning_rate,
        }
        if suffix is not None:
            metrics |= suffix_means(suffix_totals)
        return state, metrics | self.updater.method.step_metrics(metrics)

    def _accumulate_suffix(self, params, grads, rows, suffix: SuffixRows, coefficient: float):
        """Adds the gradient of these suffix rows; their weights already divide by the tokens of the whole step."""
        sums: dict[str, Any] = {}
        for p in self.pack(suffix.plain, rows.tolist()):
            places = (p.row_BM, p.column_BM)  # unused slots read some other place; their weight is 0
            top_ids, top_logps = self.put((suffix.top_ids_SLK[places], suffix.top_logps_SLK[places]))
            weight, inputs = self.put((p.gather(suffix.weight_SL), p.device_arrays()))
            grads, part = self.updater.suffix_gradient(
                params, grads, inputs, top_ids, top_logps, weight, np.float32(coefficient)
            )
            add_sums(sums, part)
        return grads, jax.device_get(sums)

    def _entropy(self, coefficients: Coefficients) -> float:
        return self.train.entropy_coef if coefficients.entropy is None else coefficients.entropy

    def _kl(self, coefficients: Coefficients) -> float:
        return self.train.kl_coef if coefficients.kl is None else coefficients.kl

    def _is_empty(self, coefficients: Coefficients, auxiliary_NL: np.ndarray | None, rows: np.ndarray) -> bool:
        """Whether no part of the loss has a token in these rows: Adam would still move by its momentum."""
        others = (coefficients.surrogate, coefficients.suffix, self._kl(coefficients), self._entropy(coefficients))
        return auxiliary_NL is not None and not any(others) and not auxiliary_NL[rows].any()

    def _slices(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """What shares one denominator: the whole mini-batch, or each run of ``micro_rows`` rows (agg = "micro")."""
        size = max(len(rows), 1) if self.train.agg == "minibatch" else self.train.micro_rows
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def _scales(
        self,
        batch: RowBatch,
        rows: np.ndarray,
        coefficients: Coefficients,
        parts: int,
        auxiliary_NL: np.ndarray | None = None,
    ) -> Scales:
        tokens = float(batch.mask_NL[rows].sum()) + _EPS
        auxiliary_tokens = tokens if auxiliary_NL is None else float(auxiliary_NL[rows].sum()) + _EPS
        return Scales(
            surrogate=np.float32(coefficients.surrogate / tokens / parts),
            kl=np.float32(self._kl(coefficients) / tokens / parts),
            entropy=np.float32(self._entropy(coefficients) / tokens / parts),
            auxiliary=np.float32(coefficients.auxiliary / auxiliary_tokens / parts),
        )

    def _accumulate(self, params, grads, rows, batch: RowBatch, fields, sequences: Sequences, scales: Scales):
        packed = self.pack(sequences, rows.tolist())
        if self.updater.method.separable:
            sums: dict[str, Any] = {}
            for p in packed:
                values = self.put({name: p.gather(x) for name, x in fields.items()})
                grads, part = self.updater.gradient(params, grads, self.put(p.device_arrays()), values, scales)
                add_sums(sums, part)
            return grads, jax.device_get(sums)
        return self._accumulate_coupled(params, grads, rows, packed, batch, fields, scales)

    def _accumulate_coupled(self, params, grads, rows, packed, batch: RowBatch, fields, scales: Scales):
        """Two passes: the loss couples tokens or rows, so its derivative is taken over the whole slice first."""
        inputs = [self.put(p.device_arrays()) for p in packed]
        student_NL = np.zeros_like(batch.old_NL)
        for p, logps in zip(packed, jax.device_get([self.updater.score(params, x) for x in inputs])):
            p.scatter(logps, student_NL)
        size = self.train.minibatch_rows if self.train.agg == "minibatch" else self.train.micro_rows
        rows_padded = np.concatenate([rows, np.full(size - len(rows), rows[0])])
        mask_NL = batch.mask_NL[rows_padded] & (np.arange(size) < len(rows))[:, None]
        slice_fields = {name: x[rows_padded] for name, x in fields.items()}
        cotangent, sums = self.updater.cotangent(student_NL[rows_padded], slice_fields, mask_NL, scales)
        sums, cotangent_NL = jax.device_get(sums), np.zeros_like(batch.old_NL)
        cotangent_NL[rows] = np.asarray(cotangent)[: len(rows)]
        for p, x in zip(packed, inputs):
            grads, part = self.updater.backpropagate(params, grads, x, self.put(p.gather(cotangent_NL)), scales)
            add_sums(sums, jax.device_get(part))
        return grads, sums


def minibatches(
    n: int, train: TrainConfig, seed: int, step: int, home: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Row indices of each mini-batch: consecutive slices of the trajectory order, or of a seeded permutation.

    ``home`` gives the group of each row where extra rows stand behind all others: each takes the place after the rows
    of its group, and there may be more rows than ``n``.
    """
    order = np.arange(n) if home is None else np.argsort(home, kind="stable")
    if train.minibatch_order == "shuffle":
        order = np.random.default_rng(derive_seed(seed, "minibatch", step=step)).permutation(len(order))
    for start in range(0, len(order), train.minibatch_rows):
        yield order[start : start + train.minibatch_rows]


def _homes(batch: RowBatch, n: int, suffix: SuffixRows | None) -> np.ndarray | None:
    if batch.sites is None:
        return None
    tail = [] if suffix is None else [suffix.home_S]
    return np.concatenate([batch.sites.home_N[:n], *tail])


def learning_rate(train: TrainConfig, step: int) -> float:
    """Constant after a linear warm-up that starts at 0 (methods.md, section 3.7)."""
    warmup = train.warmup_share * train.steps
    return train.learning_rate * (min(1.0, (step - 1) / warmup) if warmup > 0 else 1.0)


def add_sums(totals: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds metrics of one part; names that end in ``_max`` keep the maximum."""
    for name, value in part.items():
        if name.endswith("_max"):
            totals[name] = np.maximum(totals.get(name, 0.0), value) if name in totals else value
        else:
            totals[name] = totals[name] + value if name in totals else value


def suffix_means(totals: dict[str, Any]) -> dict[str, float]:
    """The loss of all suffix rows of a step, whose weights already divide, and their plain mean KL in nats."""
    return {
        "acting/loss_suffix": float(totals["loss"]),
        "acting/suffix_kl_mean": float(totals["kl_sum"]) / (float(totals["tokens"]) + _EPS),
    }


def token_means(totals: dict[str, Any]) -> dict[str, float]:
    """Turns sums over tokens into the means that are logged."""
    tokens = float(totals.get("tokens", 0.0)) + _EPS
    aux_tokens = float(totals.get("aux_tokens", 0.0)) + _EPS
    out = {"optim/tokens": tokens}
    names = {"loss_surrogate": "train/loss_surrogate", "kl": "train/kl", "entropy": "train/entropy"}
    for name, value in totals.items():
        value = float(value)
        if name in names:
            out[names[name]] = value / tokens
        elif name == "loss_auxiliary":
            out["train/loss_auxiliary"] = value / aux_tokens
        elif name.endswith("_sum"):
            stem = name.removesuffix("_sum")
            stem += "" if stem.endswith("_frac") else "_mean"
            out[stem] = value / (aux_tokens if name.startswith("method/") else tokens)
        elif name.startswith(("method/", "optim/")):
            out[name] = value
    return out
