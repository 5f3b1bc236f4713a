"""Loss kernels: pure functions of log-probabilities, advantages and masks; they know nothing of models.

Three kinds. *Advantage functions* run once per global step over the complete batch and return `[N]` or `[N, L]`
advantages. *Token losses* run inside each mini-batch and return a `TokenSum`; those in `SEPARABLE` treat every token
alone, the others need whole rows. *Weights and terms* are the detached quantities behind both, for logs and for people.
"""

from sdjax.losses.adrs import adrs_advantages, adrs_terms
from sdjax.losses.agent_opsd import (
    agent_opsd_advantages,
    agent_opsd_terms,
    agent_opsd_weight,
    prior_released,
    prior_success,
)
from sdjax.losses.fa_sd import fa_sd, has_feedback
from sdjax.losses.grpo import clipped_surrogate, group_advantages, reference_kl, row_score, token_entropy
from sdjax.losses.grsd import grsd_advantages, grsd_multiplier, grsd_terms, has_contrast
from sdjax.losses.icsd import icsd, icsd_terms, icsd_weight
from sdjax.losses.masked import micro_token_mean, nonfinite_tokens, token_mean
from sdjax.losses.mismatch import mismatch_weight
from sdjax.losses.ocsd import ocsd_advantages, ocsd_select
from sdjax.losses.ovcsd import ovcsd_contrast, ovcsd_suffix_weight, ovcsd_trigger, suffix_forward_kl
from sdjax.losses.pcsd import pcsd, pcsd_terms, pcsd_weight
from sdjax.losses.rlsd import rlsd_advantages, rlsd_weight
from sdjax.losses.schedules import adrs_eta, rlsd_lam
from sdjax.losses.sdar import reverse_kl_opsd, sdar, sdar_gate
from sdjax.losses.skill_sd import skill_sd
from sdjax.losses.types import TokenSum

# Token losses that treat every token alone. They take any layout (padded rows, packed rows, any subset of tokens) and
# their TokenSums of any split add up to that of the whole.
SEPARABLE = frozenset(
    {
        "clipped_surrogate",
        "fa_sd",
        "reference_kl",
        "reverse_kl_opsd",
        "sdar",
        "skill_sd",
        "suffix_forward_kl",
        "token_entropy",
    }
)
# Token losses that couple tokens of a row or of the mini-batch. They take one response per row, `[N, L]`, and the whole
# mini-batch at once: in a chunk their statistics would be those of the chunk.
COUPLED = frozenset({"icsd", "pcsd"})

__all__ = [
    "COUPLED",
    "SEPARABLE",
    "TokenSum",
    "adrs_advantages",
    "adrs_eta",
    "adrs_terms",
    "agent_opsd_advantages",
    "agent_opsd_terms",
    "agent_opsd_weight",
    "clipped_surrogate",
    "fa_sd",
    "group_advantages",
    "grsd_advantages",
    "grsd_multiplier",
    "grsd_terms",
    "has_contrast",
    "has_feedback",
    "icsd",
    "icsd_terms",
    "icsd_weight",
    "micro_token_mean",
    "mismatch_weight",
    "nonfinite_tokens",
    "ocsd_advantages",
    "ocsd_select",
    "ovcsd_contrast",
    "ovcsd_suffix_weight",
    "ovcsd_trigger",
    "pcsd",
    "pcsd_terms",
    "pcsd_weight",
    "prior_released",
    "prior_success",
    "reference_kl",
    "reverse_kl_opsd",
    "rlsd_advantages",
    "rlsd_lam",
    "rlsd_weight",
    "row_score",
    "sdar",
    "sdar_gate",
    "skill_sd",
    "suffix_forward_kl",
    "token_entropy",
    "token_mean",
]
