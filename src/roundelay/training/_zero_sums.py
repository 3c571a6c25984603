"""Gradients from backward to the step: this rank's part of the sums, as the optimizer wants it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Array
from roundelay.training._refused import Refused
from roundelay.training._setup import Setup
from roundelay.training._step import AGAIN
from roundelay.training._strategy import Only, chosen
from roundelay.training._zero_flats import Flat
from roundelay.training._zero_gradients import Gradients
from roundelay.training._zero_parts import Parts

__all__ = ["Sums"]

WHY = (
    "Under ZeRO every rank has a part of the gradients only, so nothing right can be computed from "
    "this one. Use optimizer.clip_grad_norm_(…) or clip_grad_value_(…) in place of torch's, or "
    "strategy='ddp' to have whole gradients."
)


class Sums:
    """The gradients of one model in training."""

    def __init__(self, setup: Setup, parts: Parts, stage: int, *, check: bool) -> None:
        self.setup = setup
        self._tensors = [one.tensor for one in setup.parameters]
        # A scaled loss may overflow: its step is skipped then, and nothing is wrong. A device that
        # is asked, with no other rank to warn, would have to finish backward first.
        devices = {tensor.device.type for tensor in self._tensors}
        alone = setup.comm.size == 1 and devices != {"cpu"}
        check = check and setup.scaler is None and not alone
        self.gradients = Gradients(setup, parts.trained, keep=stage == 1, check=check)
        self._stand_ins: dict[int, Refused] = {}  # one for each parameter
        self._has: set[int] = set()  # parameters that have a gradient, on any rank
        self._lifted: set[int] = set()  # whose stand-in made room for a gradient
        self._dropped: set[int] = set()  # whose stand-in the user has taken away
        #: What the optimizer has in place of each parameter; guarded between steps like it.
        self._guarded = [parts.in_groups[index] for index in range(len(self._tensors))]
        self._guards: dict[int, Refused] = {}
        self._ready = False  # whether `_grads` has all that the optimizers will see
        #: By parameter, what is stepped on and its gradient.
        self._grads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._factor = 1.0  # what sums in half precision are still to be multiplied with
        self._hooks = [
            tensor.register_hook(self._lift(index))  # type: ignore[no-untyped-call]
            for index, tensor in enumerate(self._tensors)
        ]

    def _lift(self, index: int) -> Callable[[torch.Tensor], None]:
        # Weak: the collector does not see through hooks of parameters that a graph holds, so where
        # a model keeps one of its results, all of this would live for ever.
        weak = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            alive = weak()
            if alive is not None:
                alive.make_way(index)

        return hook

    def make_way(self, index: int) -> None:
        """Have the stand-in of a gradient make room for one that is about to come."""
        tensor = self._tensors[index]
        if isinstance(tensor.grad, Refused):
            tensor.grad = None
            self._lifted.add(index)
        elif self._gone(index):
            self._dropped.add(index)  # and is about to have another

    def _gone(self, index: int) -> bool:
        """Tell whether the user has taken a stand-in away, by `model.zero_grad()` for example."""
        return (index in self._has and index not in self._lifted
                and self._tensors[index].grad is None)  # fmt: skip

    # ---- while backward runs

    @property
    def lifted(self) -> bool:
        """Whether stand-ins made room for gradients in this pass."""
        return bool(self._lifted)

    @property
    def used(self) -> set[int]:
        """Parameters that got a gradient on this rank."""
        return self.gradients.used

    @property
    def broken(self) -> set[int]:
        """Parameters that got one that is not finite, on this rank."""
        return self.gradients.intake.broken

    def begin(self, order: Sequence[Flat]) -> None:
        """Expect every gradient anew."""
        self._notice()
        if self.setup.step.shared and self._factor != 1.0:
            raise InvalidArgumentError(AGAIN)  # what is there is still to be multiplied
        rows = {id(row.flat): row for row in self.gradients.rows}
        self.gradients.order = [rows[id(flat)] for flat in order]
        self.gradients.begin()
        self._ready, self._grads = False, {}

    def take(self, index: int) -> None:
        """Take a gradient."""
        self.gradients.take(index)

    def finish(self) -> None:
        """End a backward pass."""
        self.gradients.finish()

    def _notice(self) -> bool:
        """Forget the gradients that the user has forgotten; tell whether there are any."""
        gone = self._dropped.union(filter(self._gone, self._has))
        self._dropped.clear()
        if gone:
            self._has -= gone
            self.gradients.forget(gone)
        return bool(gone)

    def settle(self, used: Array, factor: float | None) -> None:
        """Know which parameters have a gradient on any rank, and put stand-ins into `.grad`."""
        self.setup.used = set(np.flatnonzero(used).tolist())
        self._has |= self.setup.used
        if factor is not None:
            self.scale(factor)
        self.stand_in()
        self.gradients.used.clear()

    def stand_in(self) -> None:
        """Put stand-ins where there is a gradient, which may be taken away to forget it."""
        self._has.update(self.gradients.used)
        self._lifted.clear()
        for index in self._has:
            tensor = self._tensors[index]
            if index not in self._stand_ins:
                self._stand_ins[index] = Refused(tensor, WHY)
                self._guards[index] = Refused(self._guarded[index], WHY)
            tensor.grad = self._stand_ins[index]
        self._guard()

    def _guard(self) -> None:
        """Have gradients in the optimizer's groups refuse to be used, but for the step itself."""
        for index, piece in enumerate(self._guarded):
            piece.grad = self._guards[index] if index in self._has else None

    # ---- before the step

    @property
    def _casts(self) -> bool:
        return self.setup.precision.mixed

    def ready(self) -> None:
        """Make this rank's gradients what the optimizer will see: in its dtype, unscaled."""
        changed = self._notice()
        if self._take_own() or changed:
            self._grads = {}
        elif self._ready:
            return
        self._ready = True
        grads = []
        for row in self.gradients.rows:
            if all(piece.index in self._grads for piece in row.flat.pieces):
                continue
            cut = row.flat.cut(row.part.to(row.flat.master.dtype))
            for piece, stepped, grad in zip(row.flat.pieces, row.flat.stepped, cut, strict=True):
                if piece.index in self._has and piece.index not in self._grads:
                    self._grads[piece.index] = stepped, grad
                    grads.append(grad)
        if self.setup.scaler is not None:
            self.setup.scaler.unscale(grads, self._factor)
        elif self._casts and self._factor != 1.0 and grads:
            torch._foreach_mul_(grads, self._factor)

    def _take_own(self) -> bool:
        """Take gradients that the user has set by hand: this rank's part of each."""
        own = [index for index, tensor in enumerate(self._tensors)
               if tensor.grad is not None and not isinstance(tensor.grad, Refused)]  # fmt: skip
        if not own:
            return False
        if self._factor != 1.0 or self.setup.scaler is not None:
            name = self.setup.parameters[own[0]].name
            raise InvalidArgumentError(
                f"The gradient of {name} was set by hand, but those of this step are still to be "
                f"scaled. Set gradients without rd.backward and loss scaling."
            )
        for row in self.gradients.rows:
            for piece in row.flat.pieces:
                grad = self._tensors[piece.index].grad
                if piece.index in own and grad is not None:
                    row.part[piece.inside].copy_(grad.reshape(-1)[piece.start : piece.stop])
                    row.filled = True
        self._has.update(own)
        self.stand_in()
        return True

    def hand_over(self, only: Only = None) -> None:
        """Give an optimizer its gradients, for its step."""
        self.ready()
        for piece in chosen(self._guarded, only):
            piece.grad = None
        host = self.setup.host
        for stepped, grad in self._picked(only):
            stepped.grad = grad if host is None else host.take(stepped, grad)

    def _picked(self, only: Only) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        if only is None:
            return self._grads.values()
        return [one for index, one in self._grads.items() if index in only]

    def scale(self, factor: float, only: Only = None) -> None:
        """Multiply gradients, now or when they get to the optimizer."""
        if self._ready or only is not None:
            self.ready()
            for _, grad in self._picked(only):
                grad.mul_(factor)
        elif self._casts:
            self._factor *= factor
        else:
            self.gradients.scale(factor)

    def clamp(self, value: float, only: Only = None) -> None:
        """Cut every element to at most this size."""
        self.ready()
        for _, grad in self._picked(only):
            grad.clamp_(-value, value)

    def norm(self, norm_type: float, only: Only = None) -> float:
        """Return the norm of gradients, which all ranks compute together."""
        if not norm_type > 0:
            raise InvalidArgumentError(
                f"clip_grad_norm_ under ZeRO takes norms above 0 or infinity, not {norm_type!r}."
            )
        self.ready()
        norms = [
            torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64).item()
            for _, grad in self._picked(only)
        ]
        if math.isinf(norm_type):
            most = np.array([max(norms, default=0.0)])
            return float(self.setup.within.all_reduce(most, "max")[0])
        total = np.array([sum((one**norm_type for one in norms), 0.0)])
        return float(self.setup.within.all_reduce(total)[0] ** (1 / norm_type))

    def stepped(self, only: Only = None) -> None:
        """Let go of copies that were made for the step."""
        if self._casts:
            self._let_go(only)
        self._guard()

    def _let_go(self, only: Only) -> None:
        """Make what the optimizer sees anew, when it is next asked for."""
        self._ready = False
        gone = list(self._grads) if only is None else only
        self._grads = {index: one for index, one in self._grads.items() if index not in gone}

    def zero(self, only: Only = None) -> None:
        """Make gradients zero that there are."""
        self._let_go(only)
        if only is None:
            self._factor = 1.0
            for row in self.gradients.rows:
                row.part.zero_()
        else:
            self.gradients.forget(only)

    def forget(self, only: Only = None) -> None:
        """Let go of gradients."""
        self._let_go(only)
        gone = set(self._has) if only is None else set(only)
        self._has -= gone
        self._lifted -= gone
        self._dropped -= gone
        self.gradients.used -= gone
        if only is None:
            self._factor = 1.0
        self.gradients.forget(only)
        for tensor in (*chosen(self._tensors, only), *chosen(self._guarded, only)):
            tensor.grad = None

    def remove(self) -> None:
        """Watch the parameters no more."""
        for hook in self._hooks:
            hook.remove()
