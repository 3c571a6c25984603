"""The executor: one rank walks its list of actions, whatever schedule it is from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, CommunicationError, InvalidArgumentError
from roundelay.parallel.pipeline._halves import backward_inputs
from roundelay.parallel.pipeline._messages import Form, Mail, form_of
from roundelay.parallel.pipeline._shared_memory import Received, with_memories
from roundelay.pipelines import PipelineAction, PipelineSchedule, PipelineSpan
from roundelay.training.steps import StepPasses

Adding = Callable[[], AbstractContextManager[None]]


@dataclass
class StepRecord:
    """What one rank did in one step, as counted."""

    peak: int = 0  # micro-batches whose activations were kept, each once for every stage
    messages: int = 0  # sent to other ranks
    nbytes: int = 0
    waited: float = 0.0  # seconds in which there was nothing to do but wait for a message
    #: When it computed what, in seconds of the monotonic clock; waiting is not in it.
    spans: list[PipelineSpan] = field(default_factory=list)


@dataclass
class Batch:
    """One rank's micro-batches, what to do with the last stage's output, and whether to learn."""

    inputs: Sequence[tuple[Any, ...]]
    targets: Sequence[Any]
    loss: Callable[[Any, Any], torch.Tensor] | None
    learns: bool
    micro_batches: int
    last_adds: bool  # whether another pass comes after the last action
    trains: Callable[[int], bool]  # whether a stage has parameters that get gradients
    passes: StepPasses | None = None  # where the model is prepared
    #: Makes of a loss that from which backward begins.
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass
class _LiveMicroBatch:
    """A micro-batch at a stage, between its forward and the end of its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    weights: Callable[[], None] | None = None  # the second half of its backward


class Walk:
    """One step, or one evaluation, on one rank.

    After an error nothing more is computed, but what others wait for is sent all the same, as
    zeros, and replicas find no gradients missing: they come to the end of the step, where all hear
    of it.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        programs: dict[int, Callable[..., Any]],
        comm: Communicator,
        batch: Batch,
        forms: dict[int, Form | None],
        device: torch.device,
    ) -> None:
        self._schedule, self._programs, self._comm = schedule, programs, comm
        self._batch, self._forms = batch, forms
        self._mail = Mail(comm, schedule.micro_batches, device)
        self._live: dict[tuple[int, int], _LiveMicroBatch] = {}
        #: Between stages that are both here: by stage that they go to, micro-batch and direction.
        self._here: dict[tuple[int, int, bool], list[torch.Tensor]] = {}
        self.now = PipelineAction("forward", 0, 0)
        self.record = StepRecord()
        self.failure: Exception | None = None
        self.losses: list[torch.Tensor] = []
        self.outputs: dict[int, Any] = {}

    @property
    def learns(self) -> bool:
        """Whether it goes back, too."""
        return self._batch.learns

    def run(self) -> None:
        """Do all that the schedule has for this rank."""
        actions = [
            action
            for action in self._schedule.ranks[self._comm.rank]
            if action.micro_batch < self._batch.micro_batches
            and (self._batch.learns or action.kind == "forward")
        ]
        last = max(
            (at for at, each in enumerate(actions) if each.kind in ("backward", "weight_grad")),
            default=-1,
        )
        passes = self._batch.passes
        adding = nullcontext if passes is None else passes.adding
        for at, action in enumerate(actions):
            for ahead in actions[at : at + 2]:
                self._expect(ahead)
            adds = at != last or self._batch.last_adds
            self.now = action
            now = adding if adds else nullcontext
            before = 0 if passes is None else passes.count
            self._do(action, now)
            if passes is not None and self.failure is not None and passes.count == before:
                self._miss(action, passes, now)
            self.record.peak = max(self.record.peak, len(self._live))
        self._mail.wait()
        mail, record = self._mail, self.record
        record.messages, record.nbytes, record.waited = mail.messages, mail.nbytes, mail.waited

    def _miss(self, action: PipelineAction, passes: StepPasses, adding: Adding) -> None:
        """Have replicas come to the end of a pass, which is not coming here."""
        if passes.known or not self._batch.trains(action.stage):
            return
        if action.kind in ("forward", "input_grad"):
            passes.miss_units()
            return
        with adding():
            passes.miss()

    def _do(self, action: PipelineAction, adding: Adding) -> None:
        if action.kind == "forward":
            self._forward(action)
        elif action.kind == "weight_grad":
            live = self._live.pop((action.stage, action.micro_batch), None)
            if live is not None and live.weights is not None:
                with adding():
                    self._compute(live.weights)
        else:
            self._backward(action, adding)

    def attempt(self, act: Callable[[], Any]) -> Any:
        """Do something of the model's, unless it has failed before."""
        if self.failure is not None:
            return None
        try:
            return act()
        except CollectiveMismatch as error:  # of ranks with this stage, or this part of it
            self.failure = error
        except CommunicationError:
            raise  # the ranks can't go on together
        except Exception as error:  # noqa: BLE001 - a model may raise anything, and all hear of it
            self.failure = error
        return None

    def own_failure(self) -> Exception | None:
        """Return what the model raised here, if it was that, and not another rank's."""
        others = isinstance(self.failure, CommunicationError) or is_elsewhere(self.failure)
        return None if others else self.failure

    def _compute(self, act: Callable[[], Any]) -> Any:
        """Do what is to be done now, and note how long it took."""
        began = time.perf_counter()
        result = self.attempt(act)
        if self.failure is None:
            self.record.spans.append(PipelineSpan(self.now, began, time.perf_counter()))
        return result

    # ---- forward

    def _forward(self, action: PipelineAction) -> None:
        _, stage, number = action
        last = stage + 1 == self._schedule.stages
        inputs = self._inputs(stage, number)
        received = Received(stage, inputs, self._forms.get(stage - 1) if stage else None)

        def compute() -> tuple[list[torch.Tensor], Form | None]:
            with torch.set_grad_enabled(self._batch.learns):
                result = self._programs[stage](*received.given())
                received.refuse_written()
                if last:
                    return self._ended(result, number), None
            outputs = list(result) if isinstance(result, (tuple, list)) else [result]
            form = with_memories(form_of(stage, outputs), outputs, received)
            known = self._forms.setdefault(stage, form)
            if form != known:
                raise InvalidArgumentError(
                    f"Stage {stage} of the pipeline handed on {known} for one micro-batch and "
                    f"{form} for another. All micro-batches need the same form."
                )
            return outputs, form

        heard = stage in self._forms
        found = self._compute(compute)
        outputs = [] if found is None else found[0]
        if self._batch.learns and found is not None:
            grads = [value for value in inputs if _differentiable(value)] if stage else []
            kept = [value for value in outputs if value.requires_grad]
            self._live[stage, number] = _LiveMicroBatch(grads, kept)
        if not last:
            self._hand_on(stage, number, outputs, told=heard)

    def _ended(self, result: Any, number: int) -> list[torch.Tensor]:
        """Return the loss of a micro-batch, as a share of the batch's; or keep what came out."""
        if self._batch.loss is None:
            self.outputs[number] = result
            return []
        loss = self._batch.loss(result, self._batch.targets[number])
        given: object = loss
        if not isinstance(given, torch.Tensor) or given.numel() != 1:
            raise InvalidArgumentError(
                f"loss of Pipeline returns a tensor of one number, not {type(loss).__name__} of "
                f"shape {tuple(getattr(loss, 'shape', ()))}."
            )
        if self._batch.learns and not loss.requires_grad:
            raise InvalidArgumentError(
                f"loss of Pipeline returned a tensor of {loss.dtype} that has no gradient, and "
                f"nothing would be trained. Compute it of the output by operations that autograd "
                f"knows, without detach() or no_grad(), and have parameters that are not frozen."
            )
        self.losses.append(loss.detach().reshape(()))
        share = loss / self._batch.micro_batches
        return [share if self._batch.scale is None else self._batch.scale(share)]

    def _inputs(self, stage: int, number: int) -> Sequence[Any]:
        if stage == 0:
            return self._batch.inputs[number]
        rank = self._schedule.placement[stage - 1]
        if rank == self._comm.rank:
            return self._here.pop((stage, number, False), [])
        if stage - 1 not in self._forms:
            self._forms[stage - 1] = self._mail.hear(rank, stage - 1)
        form = self._forms[stage - 1]
        if form is None:
            self.failure = self.failure or _Elsewhere()
            return []
        values = self._mail.receive(form, rank, stage - 1, number, back=False)
        if self._batch.learns:
            for value, each in zip(values, form, strict=True):
                value.requires_grad_(each.differentiable)
        return values

    def _hand_on(
        self, stage: int, number: int, outputs: Sequence[torch.Tensor], *, told: bool
    ) -> None:
        rank = self._schedule.placement[stage + 1]
        if rank == self._comm.rank:
            handed = [value.detach().requires_grad_(value.requires_grad) for value in outputs]
            self._here[stage + 1, number, False] = handed
            return
        form = self._forms.setdefault(stage, None)
        if not told:
            self._mail.tell(form, rank, stage)
        if form is not None:
            values = outputs if self.failure is None else self._mail.zeros(form)
            self._mail.send(values, rank, stage, number, back=False)

    # ---- backward

    def _backward(self, action: PipelineAction, adding: Adding) -> None:
        kind, stage, number = action
        arrived = self._grads(stage, number)
        live = self._live.get((stage, number))

        def compute() -> list[torch.Tensor | None]:
            if live is None or not live.outputs:
                return []
            if kind == "input_grad":
                grads, live.weights = backward_inputs(live.outputs, arrived, live.inputs)
                return grads
            with adding():
                torch.autograd.backward(live.outputs, list(arrived))
            return [value.grad for value in live.inputs]

        grads = self._compute(compute)
        if kind == "backward":
            self._live.pop((stage, number), None)
        if stage:
            self._hand_back(stage, number, live, grads)

    def _grads(self, stage: int, number: int) -> Sequence[torch.Tensor | None]:
        """Return the gradients of what a stage has handed on."""
        if stage + 1 == self._schedule.stages:
            return [None]
        rank = self._schedule.placement[stage + 1]
        if rank == self._comm.rank:
            return self._here.pop((stage, number, True), [])
        form = self._back_form(stage)
        return self._mail.receive(form, rank, stage, number, back=True) if form else []

    def _hand_back(
        self,
        stage: int,
        number: int,
        live: _LiveMicroBatch | None,
        grads: Sequence[torch.Tensor | None] | None,
    ) -> None:
        rank = self._schedule.placement[stage - 1]
        if rank == self._comm.rank:
            if live is not None and self.failure is None:
                self._here[stage - 1, number, True] = _filled(live.inputs, grads or ())
            return
        form = self._back_form(stage - 1)
        if form:
            whole = live is not None and self.failure is None
            values = _filled(live.inputs, grads or ()) if whole and live else self._mail.zeros(form)
            self._mail.send(values, rank, stage - 1, number, back=True)

    def _back_form(self, edge: int) -> Form:
        """Return the form of the gradients that come back over an edge."""
        return tuple(each for each in self._forms.get(edge) or () if each.differentiable)

    def _expect(self, action: PipelineAction) -> None:
        """Begin to receive what an action needs, if its form is known."""
        kind, stage, number = action
        other = stage - 1 if kind == "forward" else stage + 1
        if kind == "weight_grad" or not 0 <= other < self._schedule.stages:
            return
        rank = self._schedule.placement[other]
        edge = min(stage, other)
        back = kind != "forward"
        form = self._back_form(edge) if back else self._forms.get(edge)
        if rank != self._comm.rank and form:
            self._mail.expect(form, rank, edge, number, back=back)


class _Elsewhere(Exception):  # noqa: N818 - says where
    """Another rank has failed, which tells by what."""


def is_elsewhere(error: Exception | None) -> bool:
    """Tell whether an error only says that another rank has failed."""
    return isinstance(error, _Elsewhere)


def _differentiable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _filled(inputs: Sequence[torch.Tensor], grads: Sequence[Any]) -> list[torch.Tensor]:
    """Return a gradient for every input; where none came, zeros."""
    padded = [*grads, *[None] * (len(inputs) - len(grads))]
    return [
        torch.zeros_like(value) if grad is None else grad
        for value, grad in zip(inputs, padded, strict=True)
    ]
