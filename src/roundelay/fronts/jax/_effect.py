"""What keeps calls in order: XLA may reorder calls that do not depend on each other.

Every primitive has one and the same ordered effect, so JAX threads a token through all of them, and
through every loop and branch that they stand in.
"""

from __future__ import annotations

from jax._src import effects

__all__ = ["EFFECT", "CollectiveEffect"]


class CollectiveEffect(effects.Effect):
    """A call that other ranks make too, in the same order."""

    def __repr__(self) -> str:
        return "Collective"


EFFECT = CollectiveEffect()

for _allowed in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.shardable_ordered_effects,  # JAX would refuse several devices without a way out
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(CollectiveEffect)
