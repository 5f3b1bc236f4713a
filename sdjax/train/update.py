"""The jitted parts of a training step: scoring, gradients and the optimizer.

One micro-batch is a packed batch of static shape. Losses are sums; the caller gives the scale 1 / (global count) of
each part, so that neither micro-batch splits nor data shards change a gradient. Only loss tokens reach the vocabulary
head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sdjax import losses, sharding
from sdjax.config import TrainConfig
from sdjax.losses.masked import masked_sum
from sdjax.methods.base import Method
from sdjax.models.base import Model, Prefix
from sdjax.models.embedding import head_weight
from sdjax.train.head import Head, Loss, Stats


@dataclass(frozen=True)
class Scales:
    """Coefficient / global count of each loss part, as traced scalars."""

    surrogate: Any
    kl: Any
    entropy: Any
    auxiliary: Any


jax.tree_util.register_dataclass(Scales, ["surrogate", "kl", "entropy", "auxiliary"], [])


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
    # All branches of the surrogate are proportional to the advantage, so that a positive weight may go in with it.
    adv = fields["adv"] * jax.lax.stop_gradient(fields["engine_weight"]) if "engine_weight" in fields else fields["adv"]
    surrogate = losses.clipped_surrogate(
        student,
        fields["old"],
        adv,
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
        self.head = Head(temperature, model.mesh)
        self.sampling_mask_V = jnp.asarray(sampling_mask_V)
        self.optimizer = optax.chain(
            optax.scale_by_adam(b1=train.beta1, b2=train.beta2), optax.add_decayed_weights(train.weight_decay)
        )
        state, params, small = self._shardings()
        self.init = jax.jit(self._init, out_shardings=state)
        self.score = jax.jit(self._score, out_shardings=small)
        self.prefix = jax.jit(self._prefix)
        self.score_behind = jax.jit(self._score_behind, out_shardings=small)
        self.gradient = jax.jit(self._gradient, donate_argnums=(1,), out_shardings=(params, small))
        self.cotangent = jax.jit(self._cotangent)
        self.backpropagate = jax.jit(self._backpropagate, donate_argnums=(1,), out_shardings=(params, small))
        self.top_logps = jax.jit(self._top_logps, static_argnames="k", out_shardings=small)
        self.suffix_gradient = jax.jit(self._suffix_gradient, donate_argnums=(1,), out_shardings=(params, small))
        self.apply = jax.jit(self._apply, donate_argnums=(0,), out_shardings=(state, small))
        self.token_weight = jax.jit(method.token_weight)

    def _shardings(self) -> tuple[Any, Any, Any]:
        """Where the training state, the parameters and small results lie; None: as the compiler likes.

        Small results lie on every device, so that every process of a run can read them.
        """
        mesh = self.model.mesh
        if mesh is None:
            return None, None, None
        shapes, small = self.model.shapes(), sharding.replicated(mesh)
        params = sharding.parameter_shardings(mesh, self.model.logical_axes(), shapes)
        opt = optax.tree.map_params(
            self.optimizer,
            lambda _, place: place,
            jax.eval_shape(self.optimizer.init, shapes),
            params,
            transform_non_params=lambda _: small,
        )
        return {"params": params, "opt": opt, "updates": small, "skipped": small}, params, small

    def _init(self, params: Any) -> dict[str, Any]:
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

    def states(self, params: Any, batch: Mapping[str, Array], *, remat: str, prefix: Prefix | None = None) -> Array:
        """States [B, M, D] that predict the tokens of the loss slots."""
        tokens, position, segment = (batch[key] for key in ("tokens_BT", "position_BT", "segment_BT"))
        more: dict[str, Any] = {} if prefix is None else {"prefix": prefix}
        hidden_BTD = self.model.hidden(params, tokens, position, segment, remat=remat, **more)
        return jnp.take_along_axis(hidden_BTD, batch["source_BM"][..., None], axis=1)

    def loss_and_gradient(
        self,
        params: Any,
        batch: Mapping[str, Array],
        function: Loss,
        slots: Any,
        shared: Any,
        pick: Array | None = None,
    ) -> tuple[tuple[Array, Any], Any]:
        """``Head.loss`` over one packed micro-batch: ((loss, the rest), gradient). ``pick``: the targets."""
        pick = batch["target_BM"] if pick is None else pick

        def loss(params: Any) -> tuple[Array, Any]:
            hidden_BMD = self.states(params, batch, remat=self.train.remat)
            weight_VD, mask_BM = head_weight(params), batch["mask_BM"]
            return self.head.loss(function, weight_VD, self.sampling_mask_V, hidden_BMD, pick, mask_BM, slots, shared)

        return jax.value_and_grad(loss, has_aux=True)(params)

    def _score(self, params, batch, prefix=None):
        hidden_BMD = self.states(params, batch, remat="none", prefix=prefix)
        slots = (batch["target_BM"], batch["mask_BM"])
        return self.head.score(head_weight(params), self.sampling_mask_V, hidden_BMD, *slots)

    def _prefix(self, params, tokens_FP, length_F):
        """The cache of prefixes that many rows share."""
        return self.model.prefill(params, tokens_FP, length_F)[1]

    def _score_behind(self, params, batch, cache, length_F, index_B):
        """``_score`` of packed rows that each stand behind one of the prefixes in ``cache``."""
        return self._score(params, batch, Prefix(cache.take(index_B), length_F[index_B]))

    def _gradient(self, params, accumulated, batch, fields, scales):
        """One-pass path: adds the gradient of one micro-batch to ``accumulated``."""

        def function(stats: Stats, fields, scales):
            loss, sums = token_loss(self.method, self.train, stats.logp, fields, stats.mask, scales)
            entropy = masked_sum(stats.entropy, stats.mask)
            return loss - scales.entropy * entropy, sums | {"entropy": entropy}

        (loss, sums), grads = self.loss_and_gradient(params, batch, function, fields, scales)
        return jax.tree.map(jnp.add, accumulated, grads), sums | {"loss": loss}

    def _cotangent(self, student_NL, fields, mask_NL, scales):
        """Two-pass path, first half: d loss / d student over the whole mini-batch in [rows, L] layout."""
        (loss, sums), cotangent = jax.value_and_grad(
            lambda s: token_loss(self.method, self.train, s, fields, mask_NL, scales), has_aux=True
        )(student_NL)
        return cotangent, sums | {"loss": loss}

    def _backpropagate(self, params, accumulated, batch, cotangent_BM, scales):
        """Two-pass path, second half: pulls the cotangent of one micro-batch back to the parameters."""

        def function(stats: Stats, cotangent, scales):
            entropy = masked_sum(stats.entropy, stats.mask)
            return masked_sum(cotangent * stats.logp, stats.mask) - scales.entropy * entropy, {"entropy": entropy}

        (_, sums), grads = self.loss_and_gradient(params, batch, function, cotangent_BM, scales)
        return jax.tree.map(jnp.add, accumulated, grads), sums

    def _top_logps(self, params, batch, *, k):
        """Ids and log-probabilities [B, M, k] of the k likeliest tokens in each loss slot."""
        hidden_BMD = self.states(params, batch, remat="none")
        return self.head.top(head_weight(params), self.sampling_mask_V, hidden_BMD, batch["mask_BM"], k=k)

    def _suffix_gradient(self, params, accumulated, batch, top_ids_BMK, top_logps_BMK, weight_BM, coefficient):
        """Adds the gradient of the forward KL to a teacher's top tokens: nothing else of the loss sees these rows."""

        def function(stats: Stats, slots, coefficient):
            top_logps, weight = slots
            kl = losses.suffix_forward_kl(top_logps, stats.logp, weight)
            return coefficient * kl.total, {"loss": kl.total, "tokens": kl.count, **kl.metrics}

        slots = (top_logps_BMK, weight_BM)
        (_, sums), grads = self.loss_and_gradient(params, batch, function, slots, coefficient, top_ids_BMK)
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
