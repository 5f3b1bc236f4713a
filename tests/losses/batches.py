"""Random batches with all that breaks masks: padding rows with colliding ids, NaN off the mask, one-token rows."""

import dataclasses

import numpy as np

ROWS, REAL_ROWS, LENGTH = 24, 20, 10
LOG_PROBS = ("lS", "lO", "lT", "lR", "lF", "lA")


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch; `[N]` rows, `[N, L]` response tokens. `mask` is the valid tokens, padding rows have none."""

    group: np.ndarray
    trajectory: np.ndarray
    turn: np.ndarray
    action_valid: np.ndarray
    ret: np.ndarray
    success: np.ndarray
    eligible: np.ndarray
    ok: np.ndarray
    mask: np.ndarray
    score: np.ndarray
    adv: np.ndarray
    lS: np.ndarray
    lO: np.ndarray
    lT: np.ndarray
    lR: np.ndarray
    lF: np.ndarray
    lA: np.ndarray

    def replace(self, **changes) -> "Batch":
        return dataclasses.replace(self, **changes)

    def permuted(self, order) -> "Batch":
        return Batch(**{f.name: getattr(self, f.name)[order] for f in dataclasses.fields(self)})

    def padded(self, rows: int, tokens: int, fill=np.nan) -> "Batch":
        """More padding rows and columns; ids of the new rows collide with real ones."""
        out = {}
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            value = fill if x.dtype.kind == "f" else x.flat[0]
            if field.name in ("ok", "mask"):
                value = False
            out[field.name] = np.pad(x, [(0, rows), (0, tokens)][: x.ndim], constant_values=value)
        return Batch(**out)

    def filled(self, value: float) -> "Batch":
        """The same batch with another value in every masked slot and padding row."""
        changes = {name: np.where(self.mask, getattr(self, name), value) for name in LOG_PROBS}
        changes |= {name: np.where(self.ok, getattr(self, name), value) for name in ("ret", "score", "adv")}
        return self.replace(**changes)

    def astype(self, dtype) -> "Batch":
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Batch(**{k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in fields.items()})


def _trajectories(rng):
    """(group, trajectory id, turns, success) : an all-fail, an all-win and a lone group exist."""
    ids = list(rng.permutation(1000) - 500)
    groups = [int(x) for x in ids[:5]]
    plan = [(groups[0], False)] * 2 + [(groups[1], True)] * 2 + [(groups[2], bool(rng.random() < 0.5))]
    plan += [(groups[3], True), (groups[3], False), (groups[4], False), (groups[4], True), (groups[4], False)]
    turns = np.ones(len(plan), int)
    for _ in range(REAL_ROWS - len(plan)):
        choice = rng.choice([i for i in range(len(plan)) if i != 4])
        turns[choice] += 1
    return [(g, int(ids[10 + i]), int(n), s) for i, ((g, s), n) in enumerate(zip(plan, turns))]


def make_batch(seed: int, *, scale: float = 0.6, fill: float = np.nan) -> Batch:
    """A batch of fixed shape. `scale` is the typical gap between two log-probabilities in nats."""
    rng = np.random.default_rng(seed)
    rows = [(g, t, k, s) for g, t, n, s in _trajectories(rng) for k in range(n)]
    order = rng.permutation(REAL_ROWS)
    group, trajectory, turn, success = (np.array(x)[order] for x in zip(*rows))
    lengths = rng.integers(1, LENGTH + 1, REAL_ROWS)
    lengths[:2] = 1, LENGTH
    mask = np.arange(LENGTH) < lengths[:, None]
    base = -rng.exponential(1.0, mask.shape)
    log_probs = {name: base + scale * rng.standard_normal(mask.shape) for name in LOG_PROBS}
    action_valid = rng.random(REAL_ROWS) < 0.8
    ret = np.where(success, 10.0, 0.0)
    small = Batch(
        group=group,
        trajectory=trajectory,
        turn=turn,
        action_valid=action_valid,
        ret=ret,
        success=success,
        eligible=rng.random(REAL_ROWS) < 0.8,
        ok=np.ones(REAL_ROWS, bool),
        mask=mask,
        score=ret - np.where(action_valid, 0, 0.1),
        adv=np.where(rng.random(REAL_ROWS) < 0.15, 0.0, rng.standard_normal(REAL_ROWS)),
        **log_probs,
    )
    return small.padded(ROWS - REAL_ROWS, 0, fill).filled(fill)
