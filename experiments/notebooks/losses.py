# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What each method does to a token
#
# Every method of sdjax starts from the same numbers: for each token that the policy wrote, its log-probability under
# the policy (*student*) and under the same policy with privileged text in its prompt (*teacher*). The difference is
# the **gap** $\Delta = \log p_T - \log p_S$ in nats: blue tokens are those the teacher likes better, red ones those
# it likes less. The methods differ in what they do with the gap:
#
# * *auxiliary losses* (SDAR, ICSD, PCSD) pull every token towards the teacher, with a weight;
# * *reweighting and shaping* (RLSD, AgentOPSD, ADRS, OCSD) leave the loss alone and change the advantage $A$ of the
#   token.
#
# `batch.npz` holds one real step of the quickstart: a small model that plays generated household games, a turn per
# row. `python -m experiments.notebooks.make_batch` makes it again; `rollouts/batch_*.npz` of any run works as well.
# All numbers below are those before the first update of the step, so student and old policy are the same.

# %%
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from token_boxes import token_boxes

from sdjax import losses
from sdjax.train.batch_file import load_batch

warnings.filterwarnings("ignore", message=".*Glyph.*")
saved = load_batch(Path("batch.npz"))
b, tokens = saved.batch, saved.tokens
student_NL, teacher_NL, mask_NL = b.old_NL, b.views["skills"], b.mask_NL
gap_NL = np.where(mask_NL, teacher_NL - student_NL, 0.0)

episodes = len(set(b.trajectory_N[b.ok_N]))
print(f"step {saved.step} of method {saved.method}: {episodes} episodes, {b.ok_N.sum()} turns, {mask_NL.sum()} tokens")
print(f"views: {', '.join(b.views)}")
print(f"gap: mean {gap_NL[mask_NL].mean():+.3f}, mean size {np.abs(gap_NL[mask_NL]).mean():.3f} nats")

# %% [markdown]
# ## One episode
#
# A success out of a group that also failed, if there is one: there the advantages are positive and differ from 0. The
# label left of a turn is its number and its GRPO advantage, which is the same for all tokens of the turn.


# %%
def choose_episode(batch) -> int:
    """The shortest success with an advantage; failing that, the episode with the largest advantage."""
    rows = np.flatnonzero(batch.ok_N & batch.success_N & (np.abs(batch.adv_N) > 1e-3))
    if len(rows):
        lengths = {t: int((batch.trajectory_N[batch.ok_N] == t).sum()) for t in batch.trajectory_N[rows]}
        return min(lengths, key=lambda t: (abs(lengths[t] - 5), t))  # about five turns fill a figure
    return int(batch.trajectory_N[np.argmax(np.abs(batch.adv_N))])


EPISODE = choose_episode(b)
rows = np.flatnonzero(b.ok_N & (b.trajectory_N == EPISODE))
rows = rows[np.argsort(b.turn_N[rows])]
turn_labels = [f"turn {b.turn_N[i] + 1}  A = {b.adv_N[i]:+.2f}" for i in rows]


def show(values_NL, title, colorbar, **scale):
    """The chosen episode, coloured by ``values_NL``."""
    per_turn = [np.asarray(values_NL)[i, : len(tokens[i])] for i in rows]
    token_boxes([tokens[i] for i in rows], per_turn, turn_labels, title=title, colorbar=colorbar, **scale)
    plt.show()


outcome = "won" if b.success_N[rows[0]] else "lost"
print(f"episode {EPISODE} of group {b.group_N[rows[0]]}: {len(rows)} turns, {outcome}, return {b.return_N[rows[0]]:g}")
most = max(float(np.quantile(np.abs(gap_NL[rows][mask_NL[rows]]), 0.95)), 0.1)  # a few tokens would whiten all others
show(gap_NL, "Gap: what the teacher thinks of each token", "lT - lS, nats", center=0.0, limits=(-most, most))

# %% [markdown]
# ## Auxiliary losses: a weight on the pull towards the teacher
#
# The loss is the token mean of $w\,(\log p_T - \log p_S)$ with the weight $w$ held fixed, so the gradient pushes the
# sampled token up by $w$. In the figures white is a weight of one half.
#
# **SDAR** gates by trust, $w = \sigma(5\Delta)$. At $\Delta = 0$ the gate is one half: a teacher without an opinion
# still reinforces what was sampled. **GRPO+OPSD** is this with $w = 1/2$ everywhere; its gradient does not see the
# teacher.

# %%
gate_NL = losses.sdar_gate(student_NL, teacher_NL, mask_NL)
show(gate_NL, "SDAR: gate", "weight", center=0.5, limits=(0.0, 1.0))

# %% [markdown]
# **ICSD** recalibrates the gate by the influence $u = A\,\rho\,\Delta$: would the surrogate answer a nudge towards
# the teacher? It moves weight between the tokens of a turn and keeps its sum, so a turn cannot gain or lose weight.

# %%
icsd = losses.icsd_terms(student_NL, teacher_NL, student_NL, b.adv_N, mask_NL)
top = max(1.0, float(np.max(icsd.weight[rows])))  # a weight may exceed 1
show(icsd.weight, "ICSD: influence-calibrated weight", "weight", center=0.5, limits=(0.0, top))
moved = np.abs(np.asarray(icsd.weight).sum(1) - np.asarray(gate_NL).sum(1)).max()
print(f"largest change of a turn's total weight against SDAR: {moved:.1e}")

# %% [markdown]
# **PCSD** (our reconstruction; no code is public) trusts a gap more when its neighbourhood agrees, and less where the
# support of the last eight tokens is declining.

# %%
pcsd = losses.pcsd_terms(student_NL, teacher_NL, mask_NL)
show(pcsd.weight, "PCSD: persistence weight", "weight", center=0.5, limits=(0.0, 1.0))
active = float((np.asarray(pcsd.weight)[mask_NL] > 0.5).mean())
print(f"share of tokens with a weight above one half: {active:.0%} (the paper reports 20 to 28 %)")

# %% [markdown]
# ## Reweighting and shaping: another advantage for each token
#
# The colour is the change against GRPO, $\hat A - A$: blue tokens get more credit than the turn's advantage, red ones
# less. Every figure has its own scale.
#
# **RLSD** multiplies by $\exp(\mathrm{sign}(A)\,\Delta)$ inside a narrow band, token by token.

# %%
plain_NL = np.where(mask_NL, b.adv_N[:, None], 0.0)
lam = float(losses.rlsd_lam(1))
reshaped = {"RLSD": losses.rlsd_advantages(b.adv_N, teacher_NL, student_NL, mask_NL, lam=lam)}
show(reshaped["RLSD"] - plain_NL, f"RLSD: change of the advantage (lam = {lam:.2f})", "change of A", center=0.0)

# %% [markdown]
# **AgentOPSD** sums the gaps of a turn as evidence for a belief in success and gives credit to the turns that moved
# it: the same change for all tokens of a turn. The belief starts at the group's success rate.

# %%
prior_N = losses.prior_success(b.outcome_N, b.group_N, b.trajectory_N, b.ok_N)
place = (b.trajectory_N, b.turn_N, prior_N)
reshaped["AgentOPSD"] = losses.agent_opsd_advantages(b.adv_N, teacher_NL, student_NL, mask_NL, *place)
show(reshaped["AgentOPSD"] - plain_NL, "AgentOPSD: change of the advantage", "change of A", center=0.0)
terms = losses.agent_opsd_terms(b.adv_N, teacher_NL, student_NL, mask_NL, *place)
print(f"belief before the first turn: {prior_N[rows[0]]:.2f}")
print("turn  evidence  belief  weight")
for i in rows:
    print(f"{b.turn_N[i] + 1:4d}  {terms.evidence[i]:+8.2f}  {terms.belief[i]:6.3f}  {terms.weight[i]:6.3f}")

# %% [markdown]
# **ADRS** adds the teacher's own log-probabilities, centred in each turn and whitened over the group, within a clip.
# It is active in steps 21 to 70 only; here it is shown as if it were.

# %%
eta_t = float(losses.adrs_eta(21))
reshaped["ADRS"] = losses.adrs_advantages(b.adv_N, b.score_N, teacher_NL, mask_NL, b.group_N, eta_t=eta_t)
show(reshaped["ADRS"] - plain_NL, "ADRS: change of the advantage", "change of A", center=0.0)

# %% [markdown]
# **OCSD** asks other questions: how much likelier does the answer become when the prompt already shows the *next
# observation*? It compares two prompts that differ in that observation alone, and only on the turns the policy was
# least sure of. All other turns keep $A$.

# %%
if {"future_full", "future_ablated"} <= set(b.views):
    full_NL, ablated_NL = b.views["future_full"], b.views["future_ablated"]
    eligible_N, origin = b.context["future_full"], ""
else:  # the batch was made without these views
    full_NL, ablated_NL = teacher_NL, student_NL
    eligible_N, origin = b.ok_N, ", SYNTHETIC views: skills shown and hidden"
reshaped["OCSD"] = losses.ocsd_advantages(
    b.adv_N, full_NL, ablated_NL, student_NL, mask_NL, b.trajectory_N, b.turn_N, eligible_N
)
selected_N, _ = losses.ocsd_select(student_NL, mask_NL, b.trajectory_N, b.turn_N, eligible_N)
evidence_NL = np.where(mask_NL & np.asarray(selected_N)[:, None], full_NL - ablated_NL, 0.0)
show(reshaped["OCSD"] - plain_NL, f"OCSD: change of the advantage{origin}", "change of A", center=0.0)
print(f"selected turns of this episode: {[int(b.turn_N[i]) + 1 for i in rows if selected_N[i]]}")

# %% [markdown]
# ## All tokens: the weight against the gap
#
# One dot per token of the batch; the axis of the gap is linear up to 0.1 nats and logarithmic beyond. The line is
# SDAR's gate. What a method adds to the gap alone is the distance of its dots from one curve: ICSD also looks at the
# sign of the advantage, PCSD at the neighbours.

# %%
COLORS = {"A > 0": "#2166ac", "A < 0": "#b2182b", "A = 0": "#999999"}
sign_NL = np.broadcast_to(np.sign(b.adv_N)[:, None], mask_NL.shape)
SIGNS = {"A = 0": 0, "A < 0": -1, "A > 0": 1}


def scatter(axes, x_NL, y_NL, keep_NL=mask_NL):
    for name, sign in SIGNS.items():
        chosen = keep_NL & (sign_NL == sign)
        axes.plot(
            np.asarray(x_NL)[chosen], np.asarray(y_NL)[chosen], ".", ms=3, alpha=0.5, color=COLORS[name], label=name
        )
    axes.axvline(0, color="0.8", lw=0.8, zorder=0)
    axes.set_xscale("symlog", linthresh=0.1)  # most gaps are small, a few are large
    axes.set_xticks([-5, -1, -0.1, 0, 0.1, 1, 5], ["-5", "-1", "-0.1", "0", "0.1", "1", "5"], fontsize=8)
    axes.minorticks_off()
    axes.set_xlim(-8, 8)


line = np.linspace(-8, 8, 4001)
figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained", sharex=True)
for axes, (name, weight_NL) in zip(panels, {"SDAR": gate_NL, "ICSD": icsd.weight, "PCSD": pcsd.weight}.items()):
    scatter(axes, gap_NL, weight_NL)
    axes.plot(line, 1 / (1 + np.exp(-5 * line)), color="black", lw=1, label="SDAR's gate")
    axes.set(title=name, xlabel="gap lT - lS, nats")
panels[0].set_ylabel("weight of the token")
panels[0].legend(loc="upper left", fontsize=8, markerscale=3)
plt.show()

# %% [markdown]
# The same for the advantage. RLSD is one curve for each $A$ and flat outside its band; AgentOPSD ignores the single
# gap; ADRS follows the teacher's log-probability rather than the gap; OCSD is drawn against its own evidence, on the
# selected turns.

# %%
figure, panels = plt.subplots(1, 4, figsize=(14, 3.6), layout="constrained")
for axes, (name, adv_NL) in zip(panels, reshaped.items()):
    on_evidence = name == "OCSD"
    x_NL = evidence_NL if on_evidence else gap_NL
    keep_NL = mask_NL & np.asarray(selected_N)[:, None] if on_evidence else mask_NL
    scatter(axes, x_NL, np.asarray(adv_NL) - plain_NL, keep_NL)
    axes.set(title=name, xlabel="lF - lA, nats" if on_evidence else "gap lT - lS, nats")
panels[0].set_ylabel("change of the advantage")
panels[0].legend(loc="upper left", fontsize=8, markerscale=3)
plt.show()
