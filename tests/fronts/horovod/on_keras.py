"""What ranks do with `roundelay.horovod.keras`: run by test_frameworks.py, on one of its backends.

KERAS_BACKEND=jax roundelay run -n 2 on_keras.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import roundelay.horovod.keras as hvd

RANKS, ROWS = 2, 8


def model_of(optimizer: Any) -> Any:
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    return model


def data() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(RANKS * ROWS * 3, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]]).astype("float32")


def whole_batches(x: Any) -> Any:
    """Return rows in the order in which ranks have them, batch by batch."""
    return x.reshape(3, RANKS, ROWS, -1)


def weights_of(model: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(one.value) for one in model.variables]


def check_training(make: Any, **options: Any) -> None:
    """Weights are bit-equal on all ranks, and those of one device on whole batches."""
    x, y = data()
    keras.utils.set_random_seed(1)
    alone = model_of(make())
    start = alone.get_weights()
    alone.fit(x, y, batch_size=RANKS * ROWS, epochs=2, shuffle=False, verbose=0)
    keras.utils.set_random_seed(100 + hvd.rank())
    ours = model_of(hvd.DistributedOptimizer(make(), **options))
    if hvd.rank() == 0:
        ours.set_weights(start)
    mine = [whole_batches(one)[:, hvd.rank()].reshape(3 * ROWS, -1) for one in (x, y)]
    seen: list[dict[str, float]] = []
    told = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(dict(logs)))
    ours.fit(
        *mine, batch_size=ROWS, epochs=2, shuffle=False, verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                   hvd.callbacks.MetricAverageCallback(), told],
    )  # fmt: skip
    for one, expected in zip(weights_of(ours), weights_of(alone), strict=True):
        both = hvd.allgather(one[np.newaxis])
        np.testing.assert_array_equal(both[0], both[1])
        np.testing.assert_allclose(one, expected, rtol=0.02 if options else 2e-4, atol=1e-4)
    losses = hvd.allgather(np.array([[one["loss"] for one in seen]]))
    np.testing.assert_array_equal(losses[0], losses[1])


def check_loss_scaling(make: Any) -> None:
    """Where one rank's gradients are not finite, no rank steps; weights stay bit-equal."""
    x, y = data()
    keras.utils.set_random_seed(100 + hvd.rank())
    model = model_of(make(keras.optimizers.SGD(0.1, momentum=0.9)))
    mine = [whole_batches(one)[:, hvd.rank()].reshape(3 * ROWS, -1) for one in (x, y)]
    if hvd.rank() == 1:
        mine[0][ROWS + 2] = np.inf  # in the second batch
    model.fit(*mine, batch_size=ROWS, epochs=2, shuffle=False, verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])  # fmt: skip
    for one in weights_of(model):
        both = hvd.allgather(one[np.newaxis])
        assert np.isfinite(both).all()
        np.testing.assert_array_equal(both[0], both[1])
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 4


def check_warm_up() -> None:
    """The rate goes from that of one rank to that of all."""
    x, y = data()
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)))
    rates: list[float] = []

    def note(batch: int, logs: Any = None) -> None:
        del batch, logs
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()
        rates.append(float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)))

    noted = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
    warm = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, steps_per_epoch=3)
    later = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=2)
    model.fit(x[:24], y[:24], batch_size=8, epochs=3, verbose=0, callbacks=[warm, later, noted])
    want = [0.2 + 0.2 * step / 6 for step in range(1, 7)] + [0.04] * 3
    np.testing.assert_allclose(rates, want, rtol=1e-5)


def check_save_and_load() -> None:
    """A model is saved with the optimizer that it had, and loaded with one of all ranks."""
    x, y = data()
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        plain = keras.saving.load_model(path)
        assert type(plain.optimizer) is type(keras.optimizers.Adam())
        again = hvd.load_model(path)
    assert isinstance(again.optimizer, type(plain.optimizer))
    assert type(again.optimizer) is not type(plain.optimizer)
    assert int(again.optimizer.iterations) == int(model.optimizer.iterations)
    again.fit(x, y, batch_size=16, epochs=1, verbose=0)


def check_errors_are_ours() -> None:
    """A step that fails raises what went wrong; the next one may be right."""
    x, y = data()
    wide = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1 + hvd.rank())])
    wide.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    kinds: tuple[type[Exception], ...] = (hvd.HorovodInternalError,)
    if keras.backend.backend() == "tensorflow":  # which has ours in its text
        import tensorflow as tf  # noqa: PLC0415 - if it is there

        kinds = (tf.errors.UnknownError,)
    try:
        wide.fit(x, np.repeat(y, 1 + hvd.rank(), 1), batch_size=16, verbose=0)
    except kinds as error:
        assert "rank 0 has ((3, 1), (1,)), rank 1 has ((3, 2), (2,))" in str(error)
    else:
        raise AssertionError("no error")
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.fit(x, y, batch_size=16, epochs=1, verbose=0)


def check_values_and_what_is_refused() -> None:
    rank = hvd.rank()
    assert float(hvd.allreduce(np.float32(rank))) == 0.5
    assert hvd.allgather(np.full(rank + 1, rank)).tolist() == [0, 1, 1]
    assert hvd.broadcast(np.array([rank]), 1).tolist() == [1]
    for call in (
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2),
        lambda: hvd.DistributedOptimizer("sgd"),
        lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD())),
        lambda: hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD()))
        ),
        lambda: hvd.broadcast_global_variables(0),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("not refused")


if __name__ == "__main__":
    hvd.init()
    check_training(lambda: keras.optimizers.SGD(0.05, momentum=0.9))
    check_training(lambda: keras.optimizers.Adam(0.01))
    check_training(lambda: keras.optimizers.SGD(0.05), gradient_predivide_factor=2.0)
    check_training(lambda: keras.optimizers.SGD(0.05), compression=hvd.Compression.fp16)
    scaled = keras.optimizers.LossScaleOptimizer
    check_loss_scaling(lambda one: hvd.DistributedOptimizer(scaled(one)))
    check_loss_scaling(lambda one: scaled(hvd.DistributedOptimizer(one)))
    check_warm_up()
    check_save_and_load()
    check_errors_are_ours()
    check_values_and_what_is_refused()
    print(f"all is well on {keras.backend.backend()}")  # noqa: T201 - heard by the test
