"""``/generate`` of SGLang: a request as its JSON, and its answer as a ``Completion`` that can be trained on.

The server's log-probabilities are those of softmax(logits / T) over the whole vocabulary, and of the plain logits for
temperature 0. Ids that the tokenizer does not know get a bias that no draw overcomes, which is the trainer's own mask.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sdjax.errors import CompletionLost, EngineError
from sdjax.rollout.engine import Completion, Request
from sdjax.rollout.scheduler import request_label

_NEVER = -1e9  # added to a logit; finite, so that no NaN can come of it


class WrongVersion(CompletionLost):
    """Other weights drew the completion than those that were handed over last."""


@dataclass(frozen=True)
class Protocol:
    """What all requests of a run share.

    stop_ids: every id that ends an answer. sampling_mask_V: bool [V], False on ids that must not be drawn.
    """

    stop_ids: tuple[int, ...]
    sampling_mask_V: np.ndarray = field(repr=False)

    def bias(self) -> dict[str, float]:
        return {str(i): _NEVER for i in np.flatnonzero(~self.sampling_mask_V).tolist()}


def body(request: Request, prompt: np.ndarray, stop_ids: Collection[int], bias: dict[str, float], label: str) -> Any:
    """The JSON of one request. label: names the weights; prefixes cached under another one are not used."""
    sampling = {
        "temperature": request.sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": request.sampling.max_new_tokens,
        "sampling_seed": request.seed,
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
    }
    if bias:
        sampling["logit_bias"] = bias
    return {
        "input_ids": prompt.tolist(),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": label,
    }


def completion(
    answer: Any, request: Request, protocol: Protocol, *, label: str, version: int, url: str
) -> tuple[Completion, int]:
    """The completion in an answer, and how many tokens of its prompt came from the cache.

    An aborted one is returned with what it drew, perhaps nothing.

    Raises:
      WrongVersion: it was drawn from other weights than ``label``.
      CompletionLost: the answer is not what ``/generate`` promises.
      EngineError: log-probabilities are not finite, or an id that ends answers is not one of ours.
    """
    name = request_label(request)
    try:
        tokens = [int(i) for i in answer["output_ids"]]
        meta = answer["meta_info"]
        drawn = meta["output_token_logprobs"] or []
        kind, matched = meta["finish_reason"]["type"], meta["finish_reason"].get("matched")
        versions = {str(v["version"]) for v in meta.get("weight_versions") or ()} or {str(meta["weight_version"])}
        cached = int(meta.get("cached_tokens") or 0)
        logps = np.asarray([np.nan if entry[0] is None else entry[0] for entry in drawn], np.float32)
        ids = [int(entry[1]) for entry in drawn]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _unusable(name, url, f"it lacks or garbles {error!s}") from error
    if kind not in ("stop", "length", "abort"):
        raise _unusable(name, url, f"it finished as {kind!r}")
    if versions != {label} and (tokens or kind != "abort"):
        raise WrongVersion(
            f"{name}: {url} drew with weights {', '.join(sorted(versions))}; those handed over last are {label}.",
            "nobody else may update these servers; a server that was restarted gets the weights again.",
        )
    if ids != tokens:
        raise _unusable(name, url, f"it has log-probabilities of {len(ids)} tokens and {len(tokens)} tokens")
    if len(tokens) > request.sampling.max_new_tokens or (not tokens and kind != "abort"):
        raise _unusable(name, url, f"it has {len(tokens)} of 1 to {request.sampling.max_new_tokens} tokens")
    if tokens and not 0 <= min(tokens) <= max(tokens) < len(protocol.sampling_mask_V):
        raise _unusable(name, url, "it holds ids outside the vocabulary")
    if not np.all(np.isfinite(logps)):
        raise EngineError(
            f"{name}: {url} gives log-probs that are not finite (weights {label}).",
            "look at the last updates: gradient norm, learning rate, skipped updates.",
        )
    if kind == "stop" and tokens[-1] not in protocol.stop_ids:
        raise EngineError(
            f"{name}: {url} ended an answer at {matched!r} after token {tokens[-1]}, which is none of our stop ids "
            f"{list(protocol.stop_ids)}.",
            "serve the checkpoint that the run trains: its generation_config.json names the stop ids.",
        )
    return Completion(np.asarray(tokens, np.int32), logps, kind, version), cached


def _unusable(name: str, url: str, why: str) -> CompletionLost:
    return CompletionLost(f"{name}: the answer of {url} cannot be used: {why}.", "look at the server's log.")
