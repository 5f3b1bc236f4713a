"""Agreement with the shared golden values, every array of their README, in float64 and float32."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdjax import losses

PATH = Path(__file__).parents[3] / "shared" / "golden" / "methods_v1.npz"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not PATH.exists(), reason="needs ../shared/golden"),
]
CASES = ("alf", "search", "edge")
DTYPES = ("float64", "float32")
# All cases are padded to one shape, so that each dtype compiles once.
ROWS, LENGTH = 77, 16
AUGMENTED_ROWS, SUFFIX_ROWS = 90, 8
FLOAT32_ATOL = {"grpo": 5e-5, "rlsd": 5e-5, "ocsd": 5e-5, "adrs": 5e-5, "grsd": 5e-5, "agentopsd": 1e-4}


@functools.cache
def golden():
    with np.load(PATH) as data:
        return {key: data[key] for key in data.files}


def constants(case):
    return json.loads(str(golden()[f"{case}/constants"]))


def padded(x, rows):
    x = np.asarray(x)
    target = (rows, LENGTH, *x.shape[2:])[: x.ndim]
    return np.pad(x, [(0, n - have) for n, have in zip(target, x.shape)])


def inputs(case, dtype):
    prefix = f"{case}/in/"
    raw = {k.removeprefix(prefix): v for k, v in golden().items() if k.startswith(prefix)}
    out = {}
    for name, x in raw.items():
        if x.ndim == 0 or name in ("logits", "labels"):
            out[name] = x
        elif name in ("ovcsd/t_logits", "ovcsd/s_logits", "ovcsd/suffix_rows"):
            out[name] = padded(x, SUFFIX_ROWS)
        else:
            out[name] = padded(x, AUGMENTED_ROWS if name.startswith("ovcsd/") else ROWS)
    out["mask"] = (out["m"] > 0) & (out["ok"] > 0)[:, None]
    out["ok"] = out["ok"] > 0
    out["adrs_clip"] = np.float64(constants(case)["adrs_clip"])
    out["suffix_used"] = np.arange(SUFFIX_ROWS) < raw["ovcsd/suffix_rows"].shape[0]
    return {k: jnp.asarray(v, dtype if v.dtype.kind == "f" else None) for k, v in out.items()}


def loss_and_grad(name, kernel, lS_NL, **more):
    grad, result = jax.grad(lambda x: (kernel(x).mean, kernel(x)), has_aux=True)(lS_NL)
    means = result.metric_means()
    return {f"{name}/loss": result.mean, f"{name}/grad": grad} | {f"{name}/{k}": means[v] for k, v in more.items()}


def token_losses(x, c, A, has_feedback):
    lS, lO, lT, mask = x["lS"], x["lO"], x["lT"], x["mask"]
    A_NL = jnp.broadcast_to(A[:, None], mask.shape)
    fractions = {"clip_frac": "clip", "dual_frac": "dual_clip", "approx_kl": "kl_old"}
    gates = {"gate_mean": "gate", "gate_active": "gate_active", "gap_mean": "gap"}
    out = {}
    out |= loss_and_grad("ppo", lambda z: losses.clipped_surrogate(z, lO, A_NL, mask), lS, **fractions)
    out |= loss_and_grad("k3", lambda z: losses.reference_kl(z, x["lR"], mask), lS)
    out |= loss_and_grad("grpo_opsd", lambda z: losses.sdar(z, lT, mask, beta=0.0), lS)
    out |= loss_and_grad("sdar", lambda z: losses.sdar(z, lT, mask), lS, **gates)
    out |= loss_and_grad("skill_sd", lambda z: losses.skill_sd(z, lT, lO, mask), lS)
    out |= loss_and_grad("reverse_kl", lambda z: losses.reverse_kl_opsd(z, lT, mask), lS)
    out |= loss_and_grad("fa_sd", lambda z: losses.fa_sd(z, lT, mask, has_feedback), lS)
    capped = loss_and_grad("fa", lambda z: losses.fa_sd(z, lT, mask, has_feedback, lO_NL=lO, is_cap=c["is_cap"]), lS)
    out |= {"fa_sd/loss_is": capped["fa/loss"], "fa_sd/grad_is": capped["fa/grad"]}
    for kind in ("minibatch", "turn"):
        icsd = functools.partial(losses.icsd, lT_NL=lT, lO_NL=lO, adv_N=A, mask_NL=mask, calibration=kind)
        out |= loss_and_grad(f"icsd_{kind}", icsd, lS)
        terms = losses.icsd_terms(lS, lT, lO, A, mask, calibration=kind)
        out |= {f"icsd_{kind}/weight": terms.weight, f"icsd_{kind}/calibration": terms.calibration}
        out |= {"icsd/influence": terms.influence}
    out |= loss_and_grad("pcsd", lambda z: losses.pcsd(z, lT, mask), lS)
    terms = losses.pcsd_terms(lS, lT, mask)
    out |= {f"pcsd/{k}": getattr(terms, k) for k in ("weight", "kappa", "slope", "trend")}
    out["pcsd/d_adaptive"] = terms.adaptive_gap
    out["agg/mini"] = losses.token_mean(lS, mask)
    rlsd_NL = losses.rlsd_advantages(A, lT, lO, mask, lam=c["lam_rlsd"], eps_w=c["eps_w"])
    surrogate = loss_and_grad("rlsd", lambda z: losses.clipped_surrogate(z, lO, rlsd_NL, mask), lS)
    out |= {"rlsd/adv": rlsd_NL, "rlsd/ppo_loss": surrogate["rlsd/loss"], "rlsd/ppo_grad": surrogate["rlsd/grad"]}
    return out


def advantages(x, c, A):
    lO, lT, mask, group, trajectory, turn = (x[k] for k in ("lO", "lT", "mask", "group", "traj", "turn"))
    selected, nll = losses.ocsd_select(lO, mask, trajectory, turn, x["can_replay"], rho=c["rho"])
    out = {"ocsd/selected": selected, "ocsd/nll": nll}
    out["ocsd/adv"] = losses.ocsd_advantages(
        A, x["lF"], x["lA"], lO, mask, trajectory, turn, x["can_replay"], beta=c["beta_ocsd"], rho=c["rho"]
    )
    success = losses.prior_success(x["success"], group, trajectory, x["ok"])
    raw = losses.prior_released(x["score"], group, trajectory, turn, x["ok"])
    out |= {"agentopsd/prior_success": success, "agentopsd/prior_raw": raw}
    agent = functools.partial(losses.agent_opsd_advantages, A, lT, lO, mask, trajectory, turn)
    out["agentopsd/default_turn"] = agent(success)
    out["agentopsd/default_token"] = agent(success, granularity="token")
    out["agentopsd/released_turn"] = agent(raw)
    out["agentopsd/released_token"] = agent(raw, granularity="token")
    out["agentopsd/paper_turn"] = agent(success, gamma=c["gamma_paper"])
    contrast = losses.has_contrast(x["success"], group, x["ok"])
    grsd = functools.partial(losses.grsd_advantages, A, lT, lO, mask, group, contrast, lam=c["lam_grsd"])
    out |= {"grsd/valid": contrast, "grsd/adv": grsd(g_max=c["g_max"]), "grsd/adv_wide": grsd(g_max=3.0)}
    out["grsd/q_norm"] = losses.grsd_terms(A, lT, lO, mask, group, contrast).normalised
    options = {"eta": c["eta"], "tau": c["tau"], "temp": c["temp"], "clip": x["adrs_clip"]}
    adrs = functools.partial(losses.adrs_advantages, A, x["score"], lT, mask, group, **options)
    out["adrs/released"] = adrs(eta_t=c["eta"])
    out["adrs/released_fixed_clip"] = adrs(eta_t=c["eta"], adaptive=False)
    out["adrs/gate_after"] = adrs(eta_t=c["eta"], gate="after")
    out["adrs/gate_norm"] = adrs(eta_t=c["eta"], gate="after", gate_norm=True)
    out["adrs/inactive"] = adrs(eta_t=0.0)
    terms = losses.adrs_terms(x["score"], lT, mask, group, eta_t=c["eta"], **options)
    out |= {"adrs/qhat": terms.qhat, "adrs/alpha": terms.alpha, "adrs/d": terms.preference, "adrs/gate": terms.gate}
    return out


def ovcsd(x, c):
    ok = x["ovcsd/ok"] > 0
    mask = (x["ovcsd/m"] > 0) & ok[:, None]
    action_mask = (x["ovcsd/action_mask"] > 0) & ok[:, None]
    role = x["ovcsd/role"]
    plain = jnp.where(mask, x["ovcsd/A"][:, None], 0)
    out = {"ovcsd/trigger": losses.ovcsd_trigger(x["ret"], x["success"], x["group"], x["traj"], x["ok"])}
    out["ovcsd/adv"] = losses.ovcsd_contrast(plain, x["ovcsd/site"], role == 2, action_mask, x["ovcsd/fail"])
    weight_NL = losses.ovcsd_suffix_weight(x["ovcsd/suffix_site"], action_mask)
    out["ovcsd/suffix_weight"] = jnp.max(weight_NL, axis=1)
    weight_SL = jnp.where(x["suffix_used"][:, None], weight_NL[x["ovcsd/suffix_rows"]], 0)

    def suffix(s_logits):
        teacher, ids = jax.lax.top_k(jax.nn.log_softmax(x["ovcsd/t_logits"]), c["topk"])
        student = jnp.take_along_axis(jax.nn.log_softmax(s_logits), ids, axis=-1)
        return losses.suffix_forward_kl(teacher, student, weight_SL).total

    out["ovcsd/suffix_loss"], out["ovcsd/suffix_grad_logits"] = jax.value_and_grad(suffix)(x["ovcsd/s_logits"])
    return out


@functools.partial(jax.jit, static_argnames="c_items")
def compute(x, c_items):
    c = dict(c_items)
    ok = x["ok"]
    score = jnp.where(ok, losses.row_score(x["ret"], x["action_valid"], c_inv=x["c_inv"]), 0)
    x = x | {"score": score}
    group = functools.partial(losses.group_advantages, score, x["group"], ok_N=ok)
    ids = {"trajectory_N": x["traj"], "turn_N": x["turn"]}
    A = group()
    out = {"grpo/score": score, "grpo/adv_row": A, "grpo/adv_row_nostd": group(norm_std=False)}
    out["grpo/adv_traj"] = group(stats="trajectory", **ids)
    feedback = losses.has_feedback(x["success"], x["group"], x["traj"], ok)
    out |= {"fa_sd/has_feedback": feedback} | token_losses(x, c, A, feedback) | advantages(x, c, A) | ovcsd(x, c)
    c_kl = x["c_kl"]
    out["total/grpo_no_entropy"] = out["ppo/loss"] + c_kl * out["k3/loss"]
    out["total/grpo_no_entropy_grad"] = out["ppo/grad"] + c_kl * out["k3/grad"]
    one = jnp.ones((1, 1), bool)
    for name, temperature in (("H", 1.0), ("H_T0.7", 0.7)):
        single = functools.partial(losses.token_entropy, mask_NL=one, temperature=temperature)
        value = jax.value_and_grad(lambda z: single(z[None, None]).total)  # noqa: B023
        H, grad = jax.vmap(jax.vmap(value))(x["logits"])
        out |= {f"entropy/{name}": H} | ({"entropy/grad_logits": grad} if temperature == 1.0 else {})
    return out


@functools.cache
def computed(case, dtype):
    c = constants(case)
    x = inputs(case, dtype) | {"c_kl": jnp.asarray(c["c_kl"], dtype)}
    # What differs between cases is an array above; the rest is equal and therefore static.
    static = {k: v for k, v in c.items() if k not in ("adrs_clip", "c_inv", "c_kl", "r_succ", "reward")}
    return {k: np.asarray(v, float) for k, v in compute(x, tuple(sorted(static.items()))).items()}


# The first two are not outputs of a kernel (the trainer's log-probabilities, the caller's mask); the others have their
# own tests below.
NOT_HERE = {"entropy/logp", "ovcsd/pg_mask", "ovcsd/suffix_kl", "rlsd/schedule", "adrs/schedule", "skill_sd/rho_ell"}
NOT_HERE |= {"agg/micro8"}


def names():
    if not PATH.exists():
        return []
    return sorted(k.removeprefix("alf/out/") for k in golden() if k.startswith("alf/out/"))


def test_all_outputs_are_compared():
    assert set(names()) - NOT_HERE == set(computed("alf", "float64"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [n for n in names() if n not in NOT_HERE])
def test_output(name, case, dtype):
    want = golden()[f"{case}/out/{name}"]
    got = computed(case, dtype)[name]
    got = got[tuple(slice(n) for n in want.shape)]
    if name == "grsd/q_norm":
        # Without contrast the quotient has no meaning and no effect; the kernel reports 0.
        want = np.where(golden()[f"{case}/out/grsd/valid"] > 0, want, 0)
    if dtype == "float64":
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10)
        return
    family = name.split("/")[0]
    rtol = 1e-4 if case == "edge" or family in FLOAT32_ATOL else 2e-5
    # Elements below the rounding of the largest one carry no digits in single precision.
    atol = FLOAT32_ATOL.get(family, 1e-6 * float(np.abs(want).max()))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_skill_sd_gradient_away_from_the_clamps(case):
    mask = np.asarray(inputs(case, "float64")["mask"])
    x = {k: golden()[f"{case}/in/{k}"] for k in ("lS", "lT", "lO")}
    rows, length = x["lS"].shape
    mask = mask[:rows, :length]
    inside = mask & (x["lT"] - x["lS"] < 20) & (x["lS"] - x["lO"] < 10)
    got = computed(case, "float64")["skill_sd/grad"][:rows, :length] * mask.sum()
    np.testing.assert_allclose(got[inside], golden()[f"{case}/out/skill_sd/rho_ell"][inside], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_suffix_kl_per_token(case):
    x, c = inputs(case, "float64"), constants(case)
    teacher, ids = jax.lax.top_k(jax.nn.log_softmax(x["ovcsd/t_logits"]), c["topk"])
    student = jnp.take_along_axis(jax.nn.log_softmax(x["ovcsd/s_logits"]), ids, axis=-1)
    want = golden()[f"{case}/out/ovcsd/suffix_kl"]
    for i, t in np.argwhere(want != 0)[::7]:
        weight = np.zeros(teacher.shape[:2])
        weight[i, t] = 1
        np.testing.assert_allclose(
            losses.suffix_forward_kl(teacher, student, weight).total, want[i, t], rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("case", CASES)
def test_micro_aggregation(case):
    lS, m, ok = (golden()[f"{case}/in/{k}"] for k in ("lS", "m", "ok"))
    got = losses.micro_token_mean(lS, (m > 0) & (ok > 0)[:, None], rows=8)
    np.testing.assert_allclose(got, golden()[f"{case}/out/agg/micro8"], rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_schedules(case):
    out = golden()
    rlsd = [float(losses.rlsd_lam(s)) for s in (1, 2, 50, 99, 100, 150)]
    adrs = [float(losses.adrs_eta(s)) for s in (1, 20, 21, 70, 71, 100)]
    np.testing.assert_allclose(rlsd, out[f"{case}/out/rlsd/schedule"], rtol=1e-12)
    np.testing.assert_allclose(adrs, out[f"{case}/out/adrs/schedule"], rtol=1e-12)
