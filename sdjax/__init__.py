"""Training language-model agents by reinforcement learning and self-distillation, in JAX."""
