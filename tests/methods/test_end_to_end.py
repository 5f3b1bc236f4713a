"""Every method of the registry for two steps: it trains, reads its context and logs what its definition lists."""

import math

import pytest

from sdjax import jsonl
from sdjax.methods import registry
from tests.methods.lucky import lucky_config, make_lucky
from tests.train.tiny_run import run

COMMON = {"train/score_mean", "train/loss_surrogate", "train/kl", "train/entropy", "optim/clip_frac", "optim/grad_norm"}
# Beside the teacher's own counters. Names as in metrics.jsonl.
LOGGED = {
    "grpo": set(),
    "grpo_opsd": {"train/loss_auxiliary", "method/gap_mean"},
    "sdar": {"train/loss_auxiliary", "method/gap_mean", "method/gate_mean", "method/gate_active_mean"},
    "skill_sd": {"train/loss_auxiliary", "method/k3_max", "method/rho_max", "method/ell_mean"},
    "icsd": {
        "train/loss_auxiliary",
        "method/opposed_before_frac",
        "method/opposed_after_frac",
        "method/weight_max",
        "method/ambiguous_mean",
        "method/mu_mean",
        "method/b_lo_mean",
        "method/b_hi_mean",
    },
    "pcsd": {
        "train/loss_auxiliary",
        "method/weight_active_mean",
        "method/kappa_mean",
        "method/declining_mean",
        "method/gap_mean",
    },
    "reverse_kl_opsd": {"train/loss_auxiliary", "method/gap_mean"},
    "rlsd": {"method/lam", "method/gap_mean", "method/gap_std", "method/clipped_weight_frac"},
    "ocsd": {"method/selected_frac", "method/evidence_abs_mean", "method/q_mean"},
    "agent_opsd": {
        "method/evidence_abs_mean",
        "method/belief_saturated_frac",
        "method/prior_mean",
        "method/weight_mean",
        "method/weight_min",
        "method/weight_max",
        "method/z_above_1_frac",
    },
    "adrs": {
        "method/eta",
        "method/preference_mean",
        "method/preference_positive_frac",
        "method/gate_mean",
        "method/contribution_abs_mean",
        "method/contribution_abs_max",
        "method/clipped_frac",
        "optim/entropy_coef",
    },
    "grsd": {
        "method/guided_groups_frac",
        "method/multiplier_mean",
        "teacher/contrast_groups",
        "teacher/guide_failures",
    },
    "fa_sd": {"method/effective_sample_frac", "method/gap_mean", "train/loss_auxiliary"},
    "ovcsd": set(),
}


@pytest.fixture(scope="module")
def lines_of(tiny_model, tmp_path_factory):
    """Runs a method once; returns its metrics lines and its directory."""
    done = {}

    def get(name):
        if name not in done:
            path = tmp_path_factory.mktemp(name) / "run"
            with pytest.MonkeyPatch.context() as patch:
                make_lucky(patch)
                run(lucky_config(tiny_model, name), path)
            done[name] = jsonl.read(path / "metrics.jsonl"), path
        return done[name]

    return get


@pytest.mark.parametrize("name", registry.names())
def test_a_method_trains_and_logs_its_metrics(lines_of, name):
    lines, path = lines_of(name)
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        bad = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        assert not bad
    wanted = COMMON | LOGGED.get(name, set())
    for line in lines[1:]:
        assert not wanted - line.keys()
        assert 0 < line["train/win_rate"] < 1  # else the run would say nothing about groups with a contrast
        assert line["optim/grad_norm"] > 0 and line["optim/skipped_updates"] == 0
    method = registry.method_class(name)
    for kind in set(method.extra_validations) - {"sampled"}:  # the usual validation is sampled already
        assert 0 <= lines[-1][f"val_{kind}/success"] <= 100 and (path / f"val_{kind}" / "step_000002.jsonl").exists()
    if "teacher_weights" in method.extra_validations:
        lead = lines[-1]["val_teacher_weights/success"] - lines[-1]["val/success"]
        assert lines[-1]["val_teacher_weights/minus_student"] == lead
    views = method.views
    for view in views:
        assert (path / f"teacher_prompt_{view}.txt").read_text()
    if views:
        assert all(
            line["teacher/context_frac"] == 1.0
            and line["teacher/gap_abs_mean" if len(views) == 1 else f"teacher/{views[0]}/gap_abs_mean"] > 0
            for line in lines[1:]
        )
