"""The jitted parts of a training step: scoring, gradients and the optimizer.

One micro-batch is a packed batch of static shape. Losses are sums; the caller gives the scale 1 / (global count) of
each part, so that neither micro-batch splits nor data shards change a gradient. Only loss tokens reach the vocabulary
head.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sdjax import losses
from sdjax.config import TrainConfig
from sdjax.losses.masked import masked_sum
from sdjax.methods.base import Method
from sdjax.models.base import Model, Prefix, masked_logits

_HEAD_CHUNK = 128  # loss slots whose logits are alive at the same time, per packed row


@dataclass(frozen=True)
class Scales:
    """Coefficient / global count of each loss part, as traced scalars."""

    surrogate: Any
    kl: Any
    entropy: Any
    auxiliary: Any


jax.tree_util.register_dataclass(Scales, ["surrogate", "kl", "entropy", "auxiliary"], [])


def over_slots(
    model: Model,
    params: Any,
    batch: Mapping[str, Array],
    sampling_mask_V: Array,
    function: Callable[..., Any],
    slots: Sequence[Array],
    *,
    remat: bool,
    prefix: Prefix | None = None,
) -> Any:
    """Calls ``function(logits_BCV, *slots_BC)`` on one chunk of loss slots after the other, so that the logits of all
    slots are never alive together. A chunk that no packed row uses is skipped and gives zeros. Returns the results with
    the chunks as leading axis; see ``join_chunks``."""
    tokens, position, segment = (batch[key] for key in ("tokens_BT", "position_BT", "segment_BT"))
    more: dict[str, Any] = {} if prefix is None else {"prefix": prefix}
    hidden = model.hidden(params, tokens, position, segment, remat=remat, **more)
    picked = jnp.take_along_axis(hidden, batch["source_BM"][..., None], axis=1)
    B, M = picked.shape[:2]
    chunk = _HEAD_CHUNK if M % _HEAD_CHUNK == 0 else M

    def results(hidden_BCD, *rest):
        return function(masked_logits(model.logits(params, hidden_BCD), sampling_mask_V), *rest)

    def nothing(*chunks):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(results, *chunks))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def head(_, chunks):
        used_BC, *rest = chunks
        # Packed rows fill their slots from the left, and answers are much shorter than the slots reserved for them.
        return None, jax.lax.cond(used_BC.any(), results, nothing, *rest)

    split = lambda x: jnp.moveaxis(x.reshape(B, M // chunk, chunk, *x.shape[2:]), 1, 0)  # noqa: E731
    return jax.lax.scan(head, None, tuple(split(x) for x in (batch["mask_BM"], picked, *slots)))[1]


def join_chunks(x: Array) -> Array:
    """[chunks, B, C, ...] -> [B, M, ...]."""
    chunks, B, C = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(B, chunks * C, *x.shape[3:])


def token_logps(
    model: Model,
    params: Any,
    batch: Mapping[str, Array],
    sampling_mask_V: Array,
    *,
    temperature: float,
    remat: bool,
    with_entropy: bool,
    prefix: Prefix | None = None,
) -> tuple[Array, losses.TokenSum | None]:
    """Log-probabilities [B, M] of the loss slots (0 in unused ones), and the sum of token entropies if wanted."""

    def function(logits, target_BC, mask_BC):
        logps = jax.nn.log_softmax(logits / temperature, axis=-1)
        taken = jnp.take_along_axis(logps, target_BC[..., None], axis=-1)[..., 0]
        entropy = losses.token_entropy(logits, mask_BC, temperature=temperature) if with_entropy else None
        return jnp.where(mask_BC, taken, 0.0), entropy

    slots = (batch["target_BM"], batch["mask_BM"])
    logps, entropy = over_slots(model, params, batch, sampling_mask_V, function, slots, remat=remat, prefix=prefix)
    return join_chunks(logps), jax.tree.map(lambda x: x.sum(0), entropy)


def token_loss(
    method: Method,
    train: TrainConfig,
    student: Array,
    fields: Mapping[str, Array],
    mask: Array,
    scales: Scales,
) -> tuple[Array, dict[str, Array]]:
    """Everything of the loss that depends on the student's log-probabilities alone (methods.md, section 3.5)."""
    clip_high = method.clip_high()
    surrogate = losses.clipped_surrogate(
        student,
        fields["old"],
        fields["adv"],
        mask,
        clip_low=train.clip_low,
        clip_high=train.clip_high if clip_high is None else clip_high,
        dual_clip=train.dual_clip,
    )
    kl = losses.reference_kl(student, fields["reference"], mask)
    loss = scales.surrogate * surrogate.total + scales.kl * kl.total
    sums = {"tokens": surrogate.count, "loss_surrogate": surrogate.total, "kl": kl.total}
    renamed = {"clip_sum": "clip_frac_sum", "dual_clip_sum": "dual_clip_frac_sum"}
    sums |= {f"optim/{renamed.get(k, k)}": v for k, v in surrogate.metrics.items()}
    auxiliary_mask = mask & fields["auxiliary_mask"].astype(bool) if "auxiliary_mask" in fields else mask
    auxiliary = method.auxiliary(student, fields, auxiliary_mask)
    if auxiliary is not None:
        loss = loss + scales.auxiliary * auxiliary.total
        sums |= {"aux_tokens": auxiliary.count, "loss_auxiliary": auxiliary.total}
        sums |= {f"method/{k}": v for k, v in auxiliary.metrics.items()}
    return loss, sums


class Updater:
    """Compiled functions of one run.

    Args:
      model, method: static.
      train: the ``train`` config.
      temperature: rollout temperature; student, teacher and reference logits are divided by it alike.
      sampling_mask_V: ids that may be sampled.
    """

    def __init__(self, model: Model, method: Method, train: TrainConfig, temperature: float, sampling_mask_V: Any):
        self.model, self.method, self.train, self.temperature = model, method, train, temperature
        self.sampling_mask_V = jnp.asarray(sampling_mask_V)
        self.optimizer = optax.chain(
            optax.scale_by_adam(b1=train.beta1, b2=train.beta2), optax.add_decayed_weights(train.weight_decay)
        )
        self.score = jax.jit(self._score)
        self.prefix = jax.jit(self._prefix)
        self.score_behind = jax.jit(self._score_behind)
        self.gradient = jax.jit(self._gradient, donate_argnums=(1,))
        self.cotangent = jax.jit(self._cotangent)
        self.backpropagate = jax.jit(self._backpropagate, donate_argnums=(1,))
        self.top_logps = jax.jit(self._top_logps, static_argnames="k")
        self.suffix_gradient = jax.jit(self._suffix_gradient, donate_argnums=(1,))
        self.apply = jax.jit(self._apply, donate_argnums=(0,))
        self.token_weight = jax.jit(method.token_weight)

    def init(self, params: Any) -> dict[str, Any]:
        """Training state: parameters, Adam moments, counts of applied and skipped updates.

        The parameters are copied, because updates donate their buffers and the initial ones stay as the reference.
        """
        params = jax.tree.map(jnp.copy, params)
        return {
            "params": params,
            "opt": self.optimizer.init(params),
            "updates": jnp.zeros((), jnp.int32),
            "skipped": jnp.zeros((), jnp.int32),
        }

    def _logps(self, params, batch, *, with_entropy, remat, prefix=None):
        return token_logps(
            self.model,
            params,
            batch,
            self.sampling_mask_V,
            temperature=self.temperature,
            remat=remat,
            with_entropy=with_entropy,
            prefix=prefix,
        )

    def _score(self, params, batch):
        return self._logps(params, batch, with_entropy=False, remat=False)[0]

    def _prefix(self, params, tokens_FP, length_F):
        """The cache of prefixes that many rows share."""
        return self.model.prefill(params, tokens_FP, length_F)[1]

    def _score_behind(self, params, batch, cache, length_F, index_B):
        """``_score`` of packed rows that each stand behind one of the prefixes in ``cache``."""
        prefix = Prefix(cache.take(index_B), length_F[index_B])
        return self._logps(params, batch, with_entropy=False, remat=False, prefix=prefix)[0]

    def _gradient(self, params, accumulated, batch, fields, scales):
        """One-pass path: adds the gradient of one micro-batch to ``accumulated``."""

        def loss_fn(params):
            student, entropy = self._logps(params, batch, with_entropy=True, remat=self.train.remat)
            assert entropy is not None
            loss, sums = token_loss(self.method, self.train, student, fields, batch["mask_BM"], scales)
            return loss - scales.entropy * entropy.total, sums | {"entropy": entropy.total}

        (loss, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(jnp.add, accumulated, grads), sums | {"loss": loss}

    def _cotangent(self, student_NL, fields, mask_NL, scales):
        """Two-pass path, first half: d loss / d student over the whole mini-batch in [rows, L] layout."""
        (loss, sums), cotangent = jax.value_and_grad(
            lambda s: token_loss(self.method, self.train, s, fields, mask_NL, scales), has_aux=True
        )(student_NL)
        return cotangent, sums | {"loss": loss}

    def _backpropagate(self, params, accumulated, batch, cotangent_BM, scales):
        """Two-pass path, second half: pulls the cotangent of one micro-batch back to the parameters."""

        def loss_fn(params):
            student, entropy = self._logps(params, batch, with_entropy=True, remat=self.train.remat)
            assert entropy is not None
            part = masked_sum(cotangent_BM * student, batch["mask_BM"])
            return part - scales.entropy * entropy.total, {"entropy": entropy.total}

        (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(jnp.add, accumulated, grads), sums

    def _top_logps(self, params, batch, *, k):
        """Ids and log-probabilities [B, M, k] of the k likeliest tokens in each loss slot."""

        def function(logits):
            logps, ids = jax.lax.top_k(jax.nn.log_softmax(logits / self.temperature, axis=-1), k)
            return ids, logps

        ids, logps = over_slots(self.model, params, batch, self.sampling_mask_V, function, (), remat=False)
        return join_chunks(ids), join_chunks(logps)

    def _suffix_gradient(self, params, accumulated, batch, top_ids_BMK, top_logps_BMK, weight_BM, coefficient):
        """Adds the gradient of the forward KL to a teacher's top tokens: nothing else of the loss sees these rows."""

        def function(logits, ids_BCK):
            return jnp.take_along_axis(jax.nn.log_softmax(logits / self.temperature, axis=-1), ids_BCK, axis=-1)

        def loss_fn(params):
            student = over_slots(
                self.model, params, batch, self.sampling_mask_V, function, (top_ids_BMK,), remat=self.train.remat
            )
            kl = losses.suffix_forward_kl(top_logps_BMK, join_chunks(student), weight_BM)
            return coefficient * kl.total, {"loss": kl.total, "tokens": kl.count, **kl.metrics}

        (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(jnp.add, accumulated, grads), sums

    def _apply(self, state, grads, learning_rate):
        """AdamW with global-norm clipping; an update with a non-finite gradient norm changes nothing and is counted."""
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm)
        factor = jnp.where(finite, jnp.minimum(1.0, self.train.grad_clip / (norm + 1e-6)), 0.0)
        safe = jax.tree.map(lambda g: jnp.where(finite, g, 0.0) * factor, grads)
        updates, opt = self.optimizer.update(safe, state["opt"], state["params"])
        params = jax.tree.map(
            lambda p, u: jnp.where(finite, p - learning_rate * u.astype(p.dtype), p), state["params"], updates
        )
        opt = jax.tree.map(lambda new, old: jnp.where(finite, new, old), opt, state["opt"])
        new_state = {
            "params": params,
            "opt": opt,
            "updates": state["updates"] + finite,
            "skipped": state["skipped"] + ~finite,
        }
        return new_state, norm
