"""Plain numpy, float64, one loop per row: the formulas as written, with no thought of speed or of NaN off the mask.

Losses are `(f, extras)`: f(lS) is the sum over valid tokens with every detached quantity frozen at the batch's own
lS, so that a difference quotient of f is the gradient that the kernel must have.
"""

import math

import numpy as np


def sigmoid(x):
    x = np.asarray(x, float)
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _clean(b, *names):
    return [np.where(b.mask, getattr(b, name), 0.0) for name in names]


def _rows(b):
    return [i for i in range(len(b.ok)) if b.mask[i].any()]


def _groups(b):
    return {g: [i for i in _rows(b) if b.group[i] == g] for g in {b.group[i] for i in _rows(b)}}


def _trajectories(b, rows):
    """Trajectories among the rows, each as its rows in turn order."""
    ids = {b.trajectory[i] for i in rows}
    return [sorted((i for i in rows if b.trajectory[i] == t), key=lambda i: b.turn[i]) for t in sorted(ids)]


# --- GRPO -----------------------------------------------------------------------------------------------------------


def group_advantages(b, stats="row", norm_std=True):
    out = np.zeros(len(b.ok))
    for rows in _groups(b).values():
        used = rows if stats == "row" else [t[0] for t in _trajectories(b, rows)]
        values = b.score[used]
        mean, std = (0.0, 1.0) if len(values) == 1 else (values.mean(), values.std(ddof=1))
        if std >= 1e-6:
            out[rows] = (b.score[rows] - mean) / (std + 1e-6 if norm_std else 1.0)
    return out


def clipped_surrogate(b, low=0.2, high=0.2, dual=3.0):
    (lO,) = _clean(b, "lO")
    adv = np.where(b.mask, np.where(b.ok, b.adv, 0.0)[:, None], 0.0)

    def f(lS):
        r = np.exp(np.where(b.mask, lS, 0) - lO)
        loss = np.maximum(-adv * r, -adv * np.clip(r, 1 - low, 1 + high))
        return np.where(b.mask, np.where(adv < 0, np.minimum(loss, -adv * dual), loss), 0).sum()

    return f, {}


def reference_kl(b):
    (lR,) = _clean(b, "lR")

    def f(lS):
        d = np.clip(lR - np.where(b.mask, lS, 0), -20, 20)
        return np.where(b.mask, np.clip(np.exp(d) - d - 1, -10, 10), 0).sum()

    return f, {}


# --- auxiliary losses -----------------------------------------------------------------------------------------------


def _pull(b, weight):
    """sum of weight * (lT - lS) with the weight frozen."""
    (lT,) = _clean(b, "lT")
    return lambda lS: (weight * (lT - np.where(b.mask, lS, 0))).sum()


def sdar(b, beta=5.0):
    lS, lT = _clean(b, "lS", "lT")
    gate = np.where(b.mask, sigmoid(beta * (lT - lS)), 0)
    return _pull(b, gate), {"weight": gate}


def reverse_kl_opsd(b):
    lS, lT = _clean(b, "lS", "lT")
    return lambda x: ((lS - lT) * np.where(b.mask, x, 0)).sum(), {}


def skill_sd(b):
    lT, lO = _clean(b, "lT", "lO")

    def f(lS):
        lS = np.where(b.mask, lS, 0)
        ell = lS - lT
        k3 = np.exp(np.minimum(-ell, 20)) - 1 + ell
        return np.where(b.mask, np.exp(np.minimum(lS - lO, 10)) * k3, 0).sum()

    return f, {}


def fa_sd(b, is_cap=None):
    lS, lT, lO = _clean(b, "lS", "lT", "lO")
    feedback = has_feedback(b)
    keep = b.mask & feedback[:, None]
    weight = np.where(keep, lS - lT, 0)
    if is_cap is not None:
        weight = weight * np.minimum(np.exp(lS - lO), is_cap)
    return lambda x: (weight * np.where(keep, x, 0)).sum(), {"count": keep.sum()}


def has_feedback(b):
    out = np.zeros(len(b.ok), bool)
    for rows in _groups(b).values():
        winners = {b.trajectory[i] for i in rows if b.success[i]}
        for i in rows:
            out[i] = bool(winners - {b.trajectory[i]})
    return out


def icsd(b, eta=0.5, beta=5.0, calibration="minibatch"):
    lS, lT, lO = _clean(b, "lS", "lT", "lO")
    rows = _rows(b)
    gap = lT - lS
    gate = np.where(b.mask, sigmoid(beta * gap), 0)
    u = np.zeros_like(gap)
    for i in rows:
        u[i] = b.adv[i] * np.exp(np.minimum(lS[i] - lO[i], 10)) * gap[i]
    phi, weight = np.zeros_like(gap), gate.copy()
    for members in [rows] if calibration == "minibatch" else [[i] for i in rows]:
        values = np.sort(np.concatenate([u[i][b.mask[i]] for i in members]))
        mu = values[(len(values) - 1) // 2]
        low, high = values[values < mu], values[values >= mu]
        b_lo = np.abs(low - mu).mean() if len(low) else 0.0
        b_hi = np.abs(high - mu).mean() if len(high) else 0.0
        for i in members:
            for t in np.flatnonzero(b.mask[i]):
                x = u[i, t] - mu
                phi[i, t] = eta * math.exp(x / (b_lo + 1e-8)) if x < 0 else 1 - (1 - eta) * math.exp(-x / (b_hi + 1e-8))
    for i in rows:
        free = b.mask[i] & ~((b.adv[i] < 0) & (gap[i] < 0))
        mass = (gate[i] * phi[i])[free].sum()
        if mass >= 1e-12:
            weight[i, free] = gate[i, free].sum() / mass * (gate[i] * phi[i])[free]
    return _pull(b, weight), {"weight": weight, "calibration": phi}


def pcsd(b, window=8, decay=0.8, gamma=0.5, beta=5.0):
    lS, lT = _clean(b, "lS", "lT")
    gap = lT - lS
    shape = gap.shape
    long, var, slope = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for i in _rows(b):
        for t in np.flatnonzero(b.mask[i]):
            js = np.array([j for j in range(max(0, t - window + 1), t + 1) if b.mask[i, j]])
            weights = decay ** (t - js)
            long[i, t] = (weights * gap[i, js]).sum() / weights.sum()
            var[i, t] = gap[i, js].var()
            if len(js) >= 3:
                slope[i, t] = np.polyfit(js, gap[i, js], 1)[0]
    kappa = np.where(b.mask, var / (var + var[b.mask].mean() + 1e-8), 0)
    adaptive = (1 - kappa) * gap + kappa * long
    trend = np.clip(1 - gamma * np.maximum(-slope / (gap[b.mask].std() + 1e-8), 0), 0, 1)
    weight = np.where(b.mask, sigmoid(beta * adaptive) * trend, 0)
    return _pull(b, weight), {"weight": weight, "kappa": kappa, "slope": slope, "trend": np.where(b.mask, trend, 0)}


# --- advantages -----------------------------------------------------------------------------------------------------


def rlsd_advantages(b, lam=0.3, eps_w=0.2):
    lT, lO = _clean(b, "lT", "lO")
    out = np.zeros(b.mask.shape)
    for i in _rows(b):
        w = np.clip(np.exp(np.sign(b.adv[i]) * (lT[i] - lO[i])), 1 - eps_w, 1 + eps_w)
        out[i] = np.where(b.mask[i], b.adv[i] * ((1 - lam) + lam * w), 0)
    return out


def ocsd_advantages(b, beta=0.5, rho=0.2):
    lF, lA, lO = _clean(b, "lF", "lA", "lO")
    out = np.zeros(b.mask.shape)
    for trajectory in _trajectories(b, _rows(b)):
        nll = {i: -lO[i][b.mask[i]].mean() for i in trajectory}
        ranked = sorted((i for i in trajectory if b.eligible[i]), key=lambda i: (-nll[i], b.turn[i]))
        selected = ranked[: max(1, math.ceil(rho * len(trajectory) - 1e-9))]
        for i in trajectory:
            q = np.tanh((lF[i] - lA[i]) / 2) if i in selected else np.zeros(b.mask.shape[1])
            out[i] = np.where(b.mask[i], b.adv[i] * (1 + beta * np.sign(b.adv[i]) * q), 0)
    return out


def prior_success(b):
    out = np.zeros(len(b.ok))
    for rows in _groups(b).values():
        out[rows] = np.mean([float(b.success[t[0]]) for t in _trajectories(b, rows)])
    return out


def prior_released(b):
    out = np.zeros(len(b.ok))
    for rows in _groups(b).values():
        out[rows] = np.mean([b.score[t[0]] for t in _trajectories(b, rows)])
    return out


def _beliefs(prior, evidence, gamma):
    """Increments of the belief after each piece of evidence."""
    start = min(max(prior, 1e-4), 1 - 1e-4)
    c, before, out = 0.0, start, []
    for e in evidence:
        c = gamma * c + e
        now = min(max(float(sigmoid(math.log(start / (1 - start)) + c)), 1e-6), 1 - 1e-6)
        out.append(now - before)
        before = now
    return np.array(out)


def agent_opsd_advantages(b, granularity="turn", gamma=1.0, lam=0.5, band=0.2, prior=None):
    lT, lO = _clean(b, "lT", "lO")
    prior = prior_success(b) if prior is None else prior
    out = np.zeros(b.mask.shape)
    for trajectory in _trajectories(b, _rows(b)):
        q = _beliefs(prior[trajectory[0]], [(lT[i] - lO[i])[b.mask[i]].sum() for i in trajectory], gamma)
        z_turn = (q - q.mean()) / (q.std() + 1e-6)
        for i, z in zip(trajectory, z_turn):
            if granularity == "token":
                q = _beliefs(prior[i], (lT[i] - lO[i])[b.mask[i]], gamma)
                z = (q - q.mean()) / (np.sqrt(q.var() + 1e-6) + 1e-6)
            w = np.clip(1 + band * np.sign(b.adv[i]) * z, 1 - band, 1 + band)
            out[i, b.mask[i]] = b.adv[i] * ((1 - lam) + lam * w)
    return out


def has_contrast(b):
    out = np.zeros(len(b.ok), bool)
    for rows in _groups(b).values():
        out[rows] = b.success[rows].any() and not b.success[rows].all()
    return out


def grsd_advantages(b, lam=0.5, dead=0.0, g_max=0.2):
    lT, lO = _clean(b, "lT", "lO")
    out = np.zeros(b.mask.shape)
    contrast = has_contrast(b)
    for rows in _groups(b).values():
        gap = {i: lT[i][b.mask[i]].mean() - lO[i][b.mask[i]].mean() for i in rows}
        e = {i: math.expm1(np.clip(np.sign(b.adv[i]) * gap[i], -20, 20)) for i in rows}
        size = np.mean([abs(x) for x in e.values()]) + 1e-6
        for i in rows:
            qn = e[i] / size
            g = np.clip(qn, -g_max, g_max) if contrast[i] and abs(qn) > dead else 0.0
            out[i, b.mask[i]] = b.adv[i] * max(1 + lam * g, 0.1)
    return out


def adrs_advantages(
    b, eta_t=0.02, eta=0.02, tau=2.0, temp=1.0, clip=0.2, adaptive=True, gate="before", gate_norm=False
):
    (lT,) = _clean(b, "lT")
    rows, groups = _rows(b), _groups(b)
    lbar = {i: lT[i][b.mask[i]].mean() for i in rows}
    center = np.mean(list(lbar.values()))
    alpha = {i: float(sigmoid((lbar[i] - center) / temp)) for i in rows}
    qhat = {i: (lT[i] - lbar[i]) / (lT[i][b.mask[i]].std() + 1e-8) for i in rows}
    d, sd = {}, {}
    for g, members in groups.items():
        a, s = np.array([alpha[i] for i in members]), b.score[members]
        d[g] = 0.0
        if len(members) > 1:
            d[g] = (a * s).sum() / (a.sum() + 1e-8) - ((1 - a) * s).sum() / ((1 - a).sum() + 1e-8)
        sd[g] = s.std(ddof=1) if len(members) > 1 else 1.0
    scale = np.std([d[b.group[i]] for i in rows], ddof=1) + 1e-8 if gate_norm else 1.0
    spread = sorted(x for x in sd.values() if x >= 1e-6)
    median = spread[(len(spread) - 1) // 2] if spread else 1.0

    out = np.zeros(b.mask.shape)
    for g, members in groups.items():
        gate_g = float(sigmoid(tau * d[g] / scale))
        r = {i: (eta * gate_g if gate == "before" else 1.0) * qhat[i] for i in members}
        tokens = np.concatenate([r[i][b.mask[i]] for i in members])
        var = tokens.var(ddof=1) if len(tokens) > 1 else 0.0
        bound = clip * min(1, sd[g] / (median + 1e-6)) if adaptive else clip
        for i in members:
            z = (r[i] - tokens.mean()) / math.sqrt(var + 1e-8) * (1.0 if gate == "before" else gate_g)
            acts = len(members) > 1 and sd[g] >= 1e-6
            extra = np.clip(eta_t * z, -bound, bound) if acts else np.zeros(b.mask.shape[1])
            out[i] = np.where(b.mask[i], b.adv[i] + extra, 0)
    return out


# --- OVCSD ----------------------------------------------------------------------------------------------------------


def ovcsd_trigger(b):
    out = np.zeros(len(b.ok), bool)
    for rows in _groups(b).values():
        returns = [b.ret[t[0]] for t in _trajectories(b, rows)]
        out[rows] = not b.success[rows].any() and (len(returns) == 1 or np.std(returns, ddof=1) <= 1e-6)
    return out


def suffix_forward_kl(teacher, student, weight):
    def f(x):
        total = 0.0
        for i, t in np.argwhere(weight != 0):
            q, p = np.exp(teacher[i, t]), np.exp(x[i, t])
            q_rest, p_rest = max(1 - q.sum(), 1e-6), max(1 - p.sum(), 1e-6)
            kl = (q * (np.log(q) - x[i, t])).sum() + q_rest * (math.log(q_rest) - math.log(p_rest))
            total += weight[i, t] * kl
        return total

    return f, {}


# --- by the names of kernels.py ---------------------------------------------------------------------------------------

REFERENCE_LOSSES = {
    "clipped_surrogate": clipped_surrogate,
    "reference_kl": reference_kl,
    "sdar": sdar,
    "grpo_opsd": lambda b: sdar(b, beta=0.0),
    "reverse_kl_opsd": reverse_kl_opsd,
    "skill_sd": skill_sd,
    "fa_sd": fa_sd,
    "fa_sd_is": lambda b: fa_sd(b, is_cap=1.5),
    "icsd": icsd,
    "icsd_turn": lambda b: icsd(b, calibration="turn"),
    "pcsd": pcsd,
}
REFERENCE_ADVANTAGES = {
    "group_row": lambda b: np.where(b.mask, group_advantages(b)[:, None], 0),
    "group_trajectory": lambda b: np.where(b.mask, group_advantages(b, "trajectory")[:, None], 0),
    "group_nostd": lambda b: np.where(b.mask, group_advantages(b, norm_std=False)[:, None], 0),
    "rlsd": rlsd_advantages,
    "ocsd": ocsd_advantages,
    "agent_turn": agent_opsd_advantages,
    "agent_token": lambda b: agent_opsd_advantages(b, granularity="token"),
    "agent_paper": lambda b: agent_opsd_advantages(b, gamma=0.95),
    "grsd": grsd_advantages,
    "adrs": adrs_advantages,
    "adrs_fixed": lambda b: adrs_advantages(b, adaptive=False),
    "adrs_after": lambda b: adrs_advantages(b, gate="after", gate_norm=True),
}
