"""The value that every token loss returns: a sum, its denominator, and metrics that can be added.

Sum and count stay apart until the caller divides once by the global count. That is what makes a loss independent of the
number of micro-batches, of data shards and of rows that carry no token.

One rule for all metrics. A name ends in

* ``_sum``: a sum over the valid tokens, with the same denominator as the loss (``x_sum / count`` is the token mean of
  x; a share is the mean of an indicator);
* ``_tokens``: a plain number of tokens;
* ``_max``: a maximum over the valid tokens, 0 when there is none.

Adding two results adds the first two kinds and takes the maximum of the third.
"""

import dataclasses

import jax
import jax.numpy as jnp

# Keeps 0 / 0 finite; far below half an ulp of any non-zero count.
COUNT_EPS = 1e-8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenSum:
    """A loss as a sum over tokens.

    total: `[]` sum over the valid tokens, in the unit of the kernel (nats, or nats times advantage).
    count: `[]` number of valid tokens, same dtype as total. It carries no gradient.
    metrics: name -> `[]` sums, counts and maxima, see the rule in the module docstring. They carry no gradient.
    """

    total: jax.Array
    count: jax.Array
    metrics: dict[str, jax.Array]

    @property
    def mean(self) -> jax.Array:
        """Token mean, ``total / (count + 1e-8)``; 0 without tokens."""
        return self.total / (self.count + COUNT_EPS)

    def __add__(self, other: "TokenSum") -> "TokenSum":
        """Joins two micro-batches. Both must come from the same kernel."""
        if self.metrics.keys() != other.metrics.keys():
            raise ValueError(
                f"metrics {sorted(self.metrics)} and {sorted(other.metrics)} differ: add results of one kernel only."
            )
        metrics = {
            name: jnp.maximum(value, other.metrics[name]) if name.endswith("_max") else value + other.metrics[name]
            for name, value in self.metrics.items()
        }
        return TokenSum(total=self.total + other.total, count=self.count + other.count, metrics=metrics)

    def metric_means(self) -> dict[str, jax.Array]:
        """Metrics ready for a log: ``x_sum`` becomes ``x`` (token mean), the other names and values stay."""
        return {
            name.removesuffix("_sum"): value / (self.count + COUNT_EPS) if name.endswith("_sum") else value
            for name, value in self.metrics.items()
        }
