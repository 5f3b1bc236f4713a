"""Every method as an object: what it does to a batch, its identities with GRPO, its constants and schedules."""

import dataclasses

import jax
import numpy as np
import pytest

from sdjax import config as config_lib
from sdjax.config import TrainConfig
from sdjax.errors import ConfigError
from sdjax.methods import registry
from sdjax.methods.ocsd import roc_area
from sdjax.train.optimize import Optimizer
from sdjax.train.update import Scales, token_loss
from tests.methods.random_batch import fields_of, make_batch

STUDY = {
    "grpo",
    "grpo_opsd",
    "sdar",
    "skill_sd",
    "rlsd",
    "ocsd",
    "ovcsd",
    "agent_opsd",
    "adrs",
    "icsd",
    "pcsd",
}
NAMES = registry.names()
AUXILIARY = ["grpo_opsd", "sdar", "skill_sd", "icsd", "pcsd", "reverse_kl_opsd", "fa_sd"]
RESHAPING = ["rlsd", "ocsd", "agent_opsd", "adrs", "grsd"]
TRAIN = TrainConfig()
STEP = 30  # inside ADRS's window, before RLSD's end


def grpo_advantages(batch):
    return registry.make("grpo").advantages(batch, STEP, 100).adv_NL


def student_of(batch, seed=1):
    noise = 0.1 * np.random.default_rng(seed).standard_normal(batch.mask_NL.shape)
    return np.where(batch.mask_NL, batch.old_NL + noise, 0).astype(np.float32)


def loss_and_gradient(method, batch, adv_NL, *, student=None):
    """The loss of the batch as one mini-batch, and its derivative by the student's log-probabilities."""
    optimizer = Optimizer.__new__(Optimizer)  # only its scales are wanted, not its compiled functions
    optimizer.train = TRAIN
    mask = method.auxiliary_mask(batch)
    scales: Scales = optimizer._scales(batch, np.arange(len(batch.ok_N)), method.coefficients(STEP, 100), 1, mask)
    fields = fields_of(batch, adv_NL) | ({} if mask is None else {"auxiliary_mask": mask})
    run = jax.jit(
        jax.value_and_grad(lambda s: token_loss(method, TRAIN, s, fields, batch.mask_NL, scales), has_aux=True)
    )
    (loss, sums), gradient = run(student_of(batch) if student is None else student)
    return float(loss), np.asarray(gradient), sums


# --- registry and constants -----------------------------------------------------------------------------------------


def test_the_registry_is_complete():
    assert set(NAMES) >= STUDY | {"grsd", "fa_sd", "reverse_kl_opsd"}


@pytest.mark.parametrize(
    ("name", "environment", "constants"),
    [
        ("sdar", "alfworld", {"beta": 5.0, "coef": 0.01}),
        ("grpo_opsd", "alfworld", {"coef": 0.01}),
        ("skill_sd", "alfworld", {"coef": 0.001}),
        ("icsd", "alfworld", {"eta": 0.5, "beta": 5.0, "coef": 0.01, "calibration": "minibatch"}),
        ("pcsd", "alfworld", {"window": 8, "decay": 0.8, "gamma": 0.5, "beta": 5.0, "coef": 0.01}),
        ("rlsd", "alfworld", {"lam_start": 0.5, "warmdown_steps": 100, "eps_w": 0.2}),
        ("ocsd", "alfworld", {"beta": 0.5, "rho": 0.2}),
        ("grsd", "alfworld", {"lam": 0.5, "dead": 0.0, "g_max": 0.2}),
        ("fa_sd", "alfworld", {"coef": 1.0, "is_cap": None, "kl_coef": 0.0, "entropy_coef": 0.0}),
        ("reverse_kl_opsd", "alfworld", {"coef": 0.01}),
        (
            "adrs",
            "alfworld",
            {
                "eta": 0.02,
                "first_step": 21,
                "last_step": 70,
                "tau": 2.0,
                "temp": 1.0,
                "clip": 0.2,
                "gate": "before",
                "gate_norm": False,
                "adaptive": True,
                "entropy_coef": 0.003,
            },
        ),
        ("adrs", "searchqa", {"adaptive": True, "entropy_coef": 0.003}),
        ("adrs", "scienceworld", {"adaptive": True, "entropy_coef": 0.003}),
        ("adrs", "webshop", {"adaptive": False, "entropy_coef": None}),
    ],
)
def test_default_presets_have_the_constants_of_the_definitions(name, environment, constants):
    config = registry.make(name, environment).config
    assert {key: getattr(config, key) for key in constants} == constants


@pytest.mark.parametrize(
    ("preset", "environment", "granularity", "gamma", "prior", "clip_high"),
    [
        ("default", "alfworld", "turn", 1.0, "outcome", None),
        ("default", "scienceworld", "turn", 1.0, "outcome", None),
        ("default", "webshop", "token", 1.0, "outcome", None),
        ("default", "searchqa", "token", 1.0, "outcome", None),
        ("released", "alfworld", "turn", 1.0, "released", None),
        ("released", "webshop", "token", 1.0, "released", None),
        ("paper", "alfworld", "turn", 0.95, "success", 0.24),
        ("paper", "webshop", "turn", 0.95, "success", 0.24),
    ],
)
def test_presets_of_agent_opsd(preset, environment, granularity, gamma, prior, clip_high):
    method = registry.make("agent_opsd", environment, preset=preset)
    config = method.config
    assert (config.granularity, config.gamma, config.prior) == (granularity, gamma, prior)
    assert method.clip_high() == clip_high and (config.lam, config.band) == (0.5, 0.2)


def test_a_key_that_is_set_wins_over_the_preset_and_ends_up_in_the_run_config():
    values = config_lib.defaults("agent_opsd", preset="paper", gamma=0.5)
    values.model.path, values.teacher.bank = "somewhere", "alfworld"
    plain = config_lib.resolved(config_lib.load(values))
    assert plain["method"]["gamma"] == 0.5 and plain["method"]["clip_high"] == 0.24
    assert config_lib.resolved(config_lib.load(plain)) == plain


@pytest.mark.parametrize("name", [n for n in NAMES if n != "agent_opsd"])
def test_an_unknown_preset_is_named(name):
    config = registry.config_class(name)
    if "preset" not in {f.name for f in dataclasses.fields(config)}:
        pytest.skip("one set of constants")
    with pytest.raises(ConfigError, match=f"method.preset = 'papr' is not a preset of {name}.*default"):
        registry.make(name, preset="papr")


def test_the_upper_clip_of_a_method_reaches_the_surrogate():
    batch = make_batch()
    adv = np.where(batch.mask_NL, 1.0, 0.0).astype(np.float32)
    student = np.where(batch.mask_NL, batch.old_NL + np.log(1.22), 0).astype(np.float32)  # beyond 0.2, within 0.24
    gradients = {}
    for preset in ("default", "paper"):
        method = registry.make("agent_opsd", preset=preset)
        with_adv, without = (loss_and_gradient(method, batch, f * adv, student=student)[1] for f in (1.0, 0.0))
        gradients[preset] = (with_adv - without)[batch.mask_NL]
    assert np.abs(gradients["default"]).max() < 1e-6 and np.abs(gradients["paper"]).min() > 1e-4


# --- advantages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_advantages_have_the_batch_shape_and_are_zero_off_the_mask(name):
    batch = make_batch()
    result = registry.make(name).advantages(batch, STEP, 100)
    assert result.adv_NL.shape == batch.mask_NL.shape and np.isfinite(result.adv_NL).all()
    assert not result.adv_NL[~batch.mask_NL].any()
    assert all(np.isfinite(v) for v in result.metrics.values())
    if result.weight_NL is not None:
        assert result.weight_NL.shape == batch.mask_NL.shape and np.isfinite(result.weight_NL[batch.mask_NL]).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in RESHAPING])
def test_methods_without_reshaping_keep_the_advantage(name):
    batch = make_batch()
    np.testing.assert_array_equal(registry.make(name).advantages(batch, STEP, 100).adv_NL, grpo_advantages(batch))


NEUTRAL = {
    "rlsd": {"lam_start": 0.0},
    "ocsd": {"beta": 0.0},
    "agent_opsd": {"lam": 0.0},
    "adrs": {"eta": 0.0},
    "grsd": {"lam": 0.0},
}


@pytest.mark.parametrize("name", RESHAPING)
def test_strength_zero_is_exactly_grpo_and_the_default_is_not(name):
    batch = make_batch()
    plain = grpo_advantages(batch)
    neutral = registry.make(name, **NEUTRAL[name]).advantages(batch, STEP, 100).adv_NL
    np.testing.assert_array_equal(neutral, plain)
    assert np.abs(registry.make(name).advantages(batch, STEP, 100).adv_NL - plain).max() > 1e-3


@pytest.mark.parametrize("name", [n for n in RESHAPING if n != "adrs"])  # ADRS reads the teacher alone, not the gap
def test_a_teacher_that_agrees_gives_exactly_grpo(name):
    batch = make_batch(teacher_is_student=True)
    np.testing.assert_array_equal(registry.make(name).advantages(batch, STEP, 100).adv_NL, grpo_advantages(batch))


@pytest.mark.parametrize(
    ("name", "band"),
    [("rlsd", 0.5 * (1 - STEP / 100) * 0.2), ("ocsd", 0.5), ("agent_opsd", 0.5 * 0.2), ("grsd", 0.5 * 0.2)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_reweighting_keeps_the_sign_and_its_band(name, band, seed):
    batch = make_batch(seed, scale=3.0)
    plain = grpo_advantages(batch)
    adv = registry.make(name).advantages(batch, STEP, 100).adv_NL
    nonzero = plain != 0
    ratio = adv[nonzero] / plain[nonzero]
    assert (np.abs(ratio - 1) <= band + 1e-5).all() and np.abs(ratio - 1).max() > 0.5 * band
    assert not adv[~nonzero].any()


def test_adrs_stays_within_its_clip_and_out_of_flat_groups():
    batch = make_batch(scale=3.0)
    result = registry.make("adrs", eta=5.0).advantages(batch, STEP, 100)
    difference = np.abs(result.adv_NL - grpo_advantages(batch))
    assert 0.19 < difference.max() <= 0.2 + 1e-6 and 0 < result.metrics["clipped_frac"] < 1
    groups = batch.group_N[batch.ok_N]
    flat = [g for g in groups if np.ptp(batch.score_N[batch.ok_N & (batch.group_N == g)]) < 1e-6]
    assert flat and not difference[np.isin(batch.group_N, flat)].any()


def test_only_selected_turns_and_groups_with_a_guide_are_reshaped():
    batch = make_batch(scale=3.0)
    plain = grpo_advantages(batch)
    ocsd = registry.make("ocsd")
    selected = ocsd.select(batch)
    assert (selected <= batch.context["future_full"]).all() and 0 < selected.sum() < batch.ok_N.sum()
    for trajectory in np.unique(batch.trajectory_N[batch.context["future_full"]]):
        assert selected[batch.ok_N & (batch.trajectory_N == trajectory)].any()
    changed = (ocsd.advantages(batch, STEP, 100).adv_NL != plain).any(1)
    assert changed.any() and not changed[~selected].any()
    guided = batch.context["guide"]
    changed = (registry.make("grsd").advantages(batch, STEP, 100).adv_NL != plain).any(1)
    assert changed.any() and not changed[~guided].any()


def test_without_any_guide_grsd_is_exactly_grpo():
    batch = make_batch()
    bare = dataclasses.replace(batch, context={**batch.context, "guide": np.zeros_like(batch.ok_N)})
    result = registry.make("grsd").advantages(bare, STEP, 100)
    np.testing.assert_array_equal(result.adv_NL, grpo_advantages(batch))
    assert result.metrics["guided_groups_frac"] == 0


def test_the_priors_of_agent_opsd_differ_as_described():
    """Outcome and success agree on won-or-lost returns; the released prior is in reward units and saturates."""
    batch = make_batch()
    means = {
        prior: registry.make("agent_opsd", prior=prior).advantages(batch, 1, 100).metrics["prior_mean"]
        for prior in ("outcome", "success", "released")
    }
    assert means["outcome"] == pytest.approx(means["success"]) and means["released"] > 5 * means["outcome"]


def test_area_under_the_curve_counts_pairs():
    score = np.array([0.1, 0.4, 0.4, 0.8])
    positive = np.array([False, True, False, True])
    # pairs (positive, negative): .4 > .1, .4 = .4, .8 > .1, .8 > .4
    assert roc_area(score, positive) == {"validity_auc": 3.5 / 4}
    assert roc_area(score, np.ones(4, bool)) == {}


# --- auxiliary losses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in AUXILIARY if n != "fa_sd"])
def test_coefficient_zero_is_exactly_grpo(name):
    batch = make_batch()
    adv = grpo_advantages(batch)
    loss, gradient, _ = loss_and_gradient(registry.make("grpo"), batch, adv)
    other_loss, other, _ = loss_and_gradient(registry.make(name, coef=0.0), batch, adv)
    np.testing.assert_array_equal(other, gradient)
    assert other_loss == loss
    assert np.abs(loss_and_gradient(registry.make(name), batch, adv)[1] - gradient).max() > 1e-6


def test_the_opsd_gradient_ignores_the_teacher_and_the_reverse_kl_one_does_not():
    batches = [make_batch(), make_batch(teacher_is_student=True)]
    adv = grpo_advantages(batches[0])
    for name, same in (("grpo_opsd", True), ("reverse_kl_opsd", False), ("sdar", False)):
        a, b = (loss_and_gradient(registry.make(name), batch, adv)[1] for batch in batches)
        assert np.array_equal(a, b) is same


def test_grpo_opsd_is_sdar_without_sharpness():
    batch = make_batch()
    adv = grpo_advantages(batch)
    expected = loss_and_gradient(registry.make("sdar", beta=0.0), batch, adv)
    found = loss_and_gradient(registry.make("grpo_opsd"), batch, adv)
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("name", AUXILIARY)
def test_token_weights_are_what_the_gradient_is_made_of(name):
    """Up to the sign, the weight shown to people is the derivative of the auxiliary sum by each log-probability."""
    batch = make_batch()
    method = registry.make(name)
    mask = batch.mask_NL if method.auxiliary_mask(batch) is None else method.auxiliary_mask(batch)
    student, fields = student_of(batch), fields_of(batch, grpo_advantages(batch))
    gradient = jax.jit(jax.grad(lambda s: method.auxiliary(s, fields, mask).total))(student)
    weight = jax.jit(method.token_weight)(student, fields, mask)
    np.testing.assert_allclose(np.abs(gradient), np.abs(weight), atol=1e-6)
    assert method.weight_name and np.abs(weight).max() > 0


def test_icsd_logs_shares_of_the_opposed_mass():
    means = {"method/gate_mean": 0.5, "method/weight_mean": 0.5}
    means |= {"method/opposed_before_mean": 0.2, "method/opposed_after_mean": 0.1}
    found = registry.make("icsd").step_metrics(means)
    assert found == {"method/opposed_before_frac": 0.4, "method/opposed_after_frac": 0.2}
    assert registry.make("icsd").step_metrics({}) == {}


# --- FA-SD ----------------------------------------------------------------------------------------------------------


def test_fa_sd_trains_rows_with_feedback_alone_and_divides_by_their_tokens():
    batch = make_batch()
    method = registry.make("fa_sd")
    feedback = batch.context["sibling"]
    assert 0 < feedback.sum() < batch.ok_N.sum()
    _, gradient, sums = loss_and_gradient(method, batch, grpo_advantages(batch))
    tokens = batch.mask_NL[feedback].sum()
    weight = np.where(batch.mask_NL, student_of(batch) - batch.views["sibling"], 0)
    np.testing.assert_allclose(gradient, np.where(feedback[:, None], weight / tokens, 0), atol=1e-6)
    assert float(sums["aux_tokens"]) == tokens
    share = method.advantages(batch, 1, 100).metrics["effective_sample_frac"]
    assert share == pytest.approx(tokens / batch.mask_NL.sum())


def test_fa_sd_replaces_surrogate_kl_and_entropy():
    batch = make_batch()
    parts = registry.make("fa_sd").coefficients(1, 100)
    assert (parts.surrogate, parts.kl, parts.entropy, parts.auxiliary) == (0.0, 0.0, 0.0, 1.0)
    gradients = [loss_and_gradient(registry.make("fa_sd"), batch, f * grpo_advantages(batch))[1] for f in (1.0, 5.0)]
    np.testing.assert_array_equal(*gradients)


def test_fa_sd_declares_its_teacher():
    assert registry.method_class("fa_sd").teacher_weights == "ema"
    assert {registry.method_class(n).teacher_weights for n in NAMES if n != "fa_sd"} == {"theta_old"}


# --- schedules ------------------------------------------------------------------------------------------------------


def test_rlsd_warms_down_over_a_hundred_steps():
    batch, method = make_batch(), registry.make("rlsd")
    lam = {step: method.advantages(batch, step, 1000).metrics["lam"] for step in (1, 50, 100, 150)}
    assert lam == pytest.approx({1: 0.495, 50: 0.25, 100: 0.0, 150: 0.0})
    np.testing.assert_array_equal(method.advantages(batch, 100, 1000).adv_NL, grpo_advantages(batch))


@pytest.mark.parametrize("step", [20, 21, 70, 71])
def test_adrs_acts_in_its_window_only(step):
    batch, method = make_batch(), registry.make("adrs")
    active = 21 <= step <= 70
    result = method.advantages(batch, step, 100)
    assert result.metrics["eta"] == pytest.approx(0.02 * active)
    assert np.array_equal(result.adv_NL, grpo_advantages(batch)) is not active
    assert method.coefficients(step, 100).entropy == (0.003 if active else None)
    assert registry.make("adrs", "webshop").coefficients(step, 100).entropy is None


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [("agent_opsd", "gamma", float), ("agent_opsd", "granularity", str), ("adrs", "adaptive", bool)],
)
def test_keys_that_a_preset_fills_have_a_type_for_the_command_line(name, key, kind):
    method = config_lib.defaults(name).method
    assert method.get_type(key) is kind and method[key] is None
    with pytest.raises(TypeError):
        method[key] = ["wrong"]
