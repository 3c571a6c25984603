"""The shape of a transformer that is not there: its tensors, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.errors import InvalidArgumentError

__all__ = ["ModelShape", "check_heads", "counted", "transformer"]

MOST_VOCABULARY = 150_000  # what goes beyond two such tables belongs to the layers
USUAL_VOCABULARY = 50_304
ONE_TABLE = 70_000  # up to so many rows and half of that, embedding and head are one table
OTHER = 0.3  # by how much layers may be larger or smaller than 12h²
LAYERS = 0.93  # of all parameters, usually
ASPECT = 128  # width by layer, where only the number of parameters is known
HEAD_WIDTH = 128


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer as its tensors' elements: before the layers, in each layer, after them."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    inputs: tuple[int, ...]
    layer: tuple[int, ...]
    outputs: tuple[int, ...]
    shared: int = 0  # elements of `inputs` that the head uses, too
    note: str = ""  # what was not said and had to be guessed

    @property
    def params(self) -> int:
        """All parameters, each once."""
        return sum(self.inputs) + self.layers * sum(self.layer) + sum(self.outputs)

    def divided(self, tp: int) -> ModelShape:
        """Return what one rank of tensor parallel has: matrices are cut, vectors are not.

        >>> transformer(layers=2, hidden=64, vocabulary=256).divided(2).params
        59136
        """
        if tp == 1:
            return self
        return ModelShape(
            self.layers, self.hidden, self.heads, self.vocabulary,
            self._cut(self.inputs, tp), self._cut(self.layer, tp), self._cut(self.outputs, tp),
            -(-self.shared // tp),
        )  # fmt: skip

    def _cut(self, tensors: tuple[int, ...], tp: int) -> tuple[int, ...]:
        least = self.hidden * min(self.hidden, self.vocabulary)
        return tuple(-(-numel // tp) if numel >= least else numel for numel in tensors)

    def units(self, stages: int, stage: int) -> list[tuple[int, ...]]:
        """Return what a stage of a pipeline has: the tensors around its layers, then each layer's.

        The first stage has the inputs and the last the outputs; a table that both use is on both.
        """
        before, after = self._ends(stages, stage)
        return [before + after, *[self.layer] * (self.layers // stages)]

    def tensors(self, stages: int, stage: int) -> list[int]:
        """Return the elements of each tensor of a stage, in the order of the parameters."""
        before, after = self._ends(stages, stage)
        return [*before, *self.layer * (self.layers // stages), *after]

    def _ends(self, stages: int, stage: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first, last = stage == 0, stage == stages - 1
        copy = (self.shared,) if last and not first and self.shared else ()
        return self.inputs if first else (), self.outputs + copy if last else ()


def transformer(
    *,
    params: int | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocabulary: int | None = None,
    positions: int = 0,
) -> ModelShape:
    """Return a transformer with layer norms, biases and perceptrons 4h wide: 12h² + 13h a layer.

    What `params` has beyond its layers are tables of embeddings and the head: one table for both,
    or, where that would have more than 105,000 rows, two. `positions` are learned.

    >>> gpt = transformer(layers=2, hidden=64, heads=2, vocabulary=256, positions=64)
    >>> gpt.params
    120576
    >>> transformer(params=7_500_000_000, layers=32, hidden=4096).vocabulary
    128886
    """
    note = ""
    if layers is None or hidden is None:
        if params is None:
            raise InvalidArgumentError(
                "A model is known by its params=, or by its layers= and hidden=. Give either."
            )
        layers, hidden = _guessed(params, layers, hidden)
        note = f"layers and width are a guess: {counted(layers, 'layer')} of {hidden}"
    if heads is not None:
        check_heads(hidden, heads)
    block = _block(hidden)
    tables = 1
    if params is None:
        vocabulary = USUAL_VOCABULARY if vocabulary is None else vocabulary
    else:
        said = vocabulary
        rest = params - layers * sum(block) - positions * hidden - 2 * hidden
        rows = rest / hidden
        tables = 2 if rows > 1.5 * (ONE_TABLE if vocabulary is None else vocabulary) else 1
        if vocabulary is None:
            vocabulary = int(min(max(rows, 0) / tables, MOST_VOCABULARY))
        short = rest - tables * vocabulary * hidden
        most = OTHER * layers * sum(block)
        if abs(short) > most:
            if said is not None and short < -most <= rest:
                raise InvalidArgumentError(_too_many_tokens(params, hidden, said))
            raise InvalidArgumentError(_no_model(params, layers, hidden, said, short))
        block = _grown(layers, hidden, block, short)
        # What does not divide by the layers is a row more of the first table.
    table = vocabulary * hidden
    found = layers * sum(block) + tables * table + positions * hidden + 2 * hidden
    odd = 0 if params is None else params - found
    inputs = [table + odd] if table + odd > 0 else []
    outputs = [table] if tables > 1 else []
    if positions:
        inputs.append(positions * hidden)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads or _heads(hidden),
        vocabulary=vocabulary,
        inputs=tuple(inputs),
        layer=block,
        outputs=(*outputs, hidden, hidden),
        shared=0 if outputs else table,
        note=note,
    )


def _block(hidden: int) -> tuple[int, ...]:
    """Return the tensors of a layer, in the order of our GPT: norm, attention, norm, perceptron."""
    square = hidden * hidden
    return (hidden, hidden, 3 * square, 3 * hidden, square, hidden,
            hidden, hidden, 4 * square, 4 * hidden, 4 * square, hidden)  # fmt: skip


def _grown(layers: int, hidden: int, block: tuple[int, ...], more: int) -> tuple[int, ...]:
    """Return layers with so many more elements in all, or fewer.

    Gates make perceptrons wider, and keys and values of few heads make attention narrower.
    """
    each = more // layers
    matrices = sum(numel for numel in block if numel >= hidden * hidden)
    return tuple(numel + (each * numel // matrices if numel >= hidden * hidden else 0)
                 for numel in block)  # fmt: skip


def _too_many_tokens(params: int, hidden: int, vocabulary: int) -> str:
    return (
        f"A vocabulary of {counted(vocabulary, 'token')} does not go with "
        f"{_parameters(params)}: its table, of width {hidden}, would have "
        f"{vocabulary * hidden:.3g} by itself. Give a smaller vocabulary, or more parameters."
    )


def _no_model(params: int, layers: int, hidden: int, vocabulary: int | None, more: int) -> str:
    """Say why layers, width and parameters can't belong together, and what is usual."""
    if more < 0:
        rest = "matrices alone"
    elif vocabulary is None:
        rest = "matrices, and no vocabulary explains the rest"
    else:
        rest = f"matrices, and {counted(vocabulary, 'token')} do not explain the rest"
    likely, width = _guessed(params, None, None)
    least = likely * sum(_block(width))
    if params < (1 - OTHER) * least:
        usual = (
            f"Without both, the smallest model that is guessed has {counted(likely, 'layer')} of "
            f"width {width}, and {least} parameters. For a smaller one give layers and width."
        )
    elif (likely, width) == (layers, hidden):
        usual = "Give other layers or another width, or leave out the parameters."
    else:
        usual = (
            f"Usual for so many parameters are {counted(likely, 'layer')} of {width}. Give other "
            f"layers or another width, or leave out the parameters."
        )
    go = "does" if params == 1 else "do"
    return (
        f"{_parameters(params)} {go} not go with {counted(layers, 'layer')} of width {hidden}: "
        f"there 12·{layers}·{hidden}² = {12 * layers * hidden * hidden:.3g} are in {rest}. "
        f"{usual}"
    )


def _parameters(count: int) -> str:
    return "1 parameter" if count == 1 else f"{count:.4g} parameters"


def check_heads(hidden: int, heads: int) -> None:
    """Refuse heads that do not divide the width."""
    if hidden % heads:
        near = next(count for count in range(min(heads, hidden), 0, -1) if hidden % count == 0)
        raise InvalidArgumentError(
            f"{counted(heads, 'head')} do not divide a width of {hidden}: each has the same share "
            f"of it. Give other heads, {near} say, or another width."
        )


def counted(count: int, word: str) -> str:
    """Count things: 1 layer, 32 layers."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def _guessed(params: int, layers: int | None, hidden: int | None) -> tuple[int, int]:
    """Return layers and width that are usual for so many parameters: width 128 times the layers."""
    if layers is not None:
        hidden = max(
            HEAD_WIDTH, round((LAYERS * params / 12 / layers) ** 0.5 / HEAD_WIDTH) * HEAD_WIDTH
        )
        return layers, hidden
    if hidden is not None:
        return max(1, round(LAYERS * params / 12 / hidden / hidden)), hidden
    count = max(1, int((LAYERS * params / 12 / ASPECT / ASPECT) ** (1 / 3)))
    count -= count % 2 if count > 1 else 0
    return count, count * ASPECT


def _heads(hidden: int) -> int:
    """Return heads of the usual width that divide the model's."""
    wanted = max(1, hidden // HEAD_WIDTH)
    return next(count for count in range(wanted, 0, -1) if hidden % count == 0)
