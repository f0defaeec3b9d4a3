"""Muon: orthogonal updates of matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

import dataclasses
import math

import jax
import optax
from jaxtyping import Array

from alibi.config.fields import number
from alibi.optimizers.gradients import AdamW
from alibi.optimizers.parameters import decayed, matrices


@dataclasses.dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the matrices of layers, and AdamW for embeddings, norms, biases and position parameters.

    A matrix is from all inputs to all outputs of a layer, such as `[width, heads * head_dim]`, of each
    layer alone. With `rms` both have updates of one size, so that one learning rate serves both (Liu
    et al. 2025, arXiv 2502.16982, section 2.2). Weight decay is the same in both.

    Attributes:
      beta: Nesterov's momentum for matrices.
      iterations: steps of Newton and Schulz.
      rms: approximate root mean square of a matrix's update before the learning rate. 0 means a
        factor sqrt(max(1, outputs / inputs)) in its place.
    """

    beta: float = number(0.95, at_least=0.0, below=1.0)
    iterations: int = number(5, at_least=1, at_most=100)
    rms: float = number(0.2, at_least=0.0)

    def make(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        of_matrices = optax.chain(
            optax.contrib.scale_by_muon(
                beta=self.beta, ns_steps=self.iterations, weight_dimension_numbers=matrices
            ),
            optax.stateless(self._sized),
            optax.add_decayed_weights(self.weight_decay, decayed),
            optax.scale_by_learning_rate(schedule),
        )
        return optax.partition(
            {"matrix": of_matrices, "other": super().make(schedule)},
            lambda params: jax.tree.map(
                lambda _, axes: "other" if axes is None else "matrix", params, matrices(params)
            ),
        )

    def _sized(self, updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        """Returns orthogonal updates times a factor for each matrix, by its numbers of inputs and outputs."""

        def sized(update: Array, axes: tuple[tuple[int, ...], ...]) -> Array:
            inputs, outputs = (math.prod(update.shape[axis] for axis in side) for side in axes)
            factor = self.rms * math.sqrt(max(inputs, outputs))
            return (factor or math.sqrt(max(1, outputs / inputs))) * update

        return jax.tree.map(sized, updates, matrices(updates))
