"""What ranks do with `roundelay.horovod.tensorflow`: run by test_frameworks.py.

roundelay run -n 2 on_tensorflow.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import roundelay.horovod.tensorflow as hvd


def both_ways(call: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [call, tf.function(call)]


def check_collectives() -> None:
    rank = hvd.rank()
    x = tf.constant([1.0, 2.0]) * (rank + 1)
    for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64):
        given = tf.cast(x, dtype)
        for call in both_ways(lambda t: hvd.allreduce(t, op=hvd.Sum)):
            assert tf.cast(call(given), tf.float32).numpy().tolist() == [3, 6], dtype
    for op, want in ((hvd.Average, [1.5, 3]), (hvd.Min, [1, 2]), (hvd.Max, [2, 4]),
                     (hvd.Product, [2, 8])):  # fmt: skip
        for call in both_ways(lambda t, op=op: hvd.allreduce(t, op=op)):
            assert call(x).numpy().tolist() == want
    for call in both_ways(lambda t: hvd.grouped_allreduce([t, t[0]], op=hvd.Sum)):
        first, second = call(x)
        assert (first.numpy().tolist(), float(second)) == ([3, 6], 3)
    rows = tf.fill([rank + 1, 2], rank)
    for call in both_ways(hvd.allgather):
        assert call(rows)[:, 0].numpy().tolist() == [0, 1, 1]
    for call in both_ways(lambda t: hvd.broadcast(t, 1)):
        assert call(x).numpy().tolist() == [2, 4]
    for call in both_ways(lambda t: hvd.alltoall(t, tf.constant([1, 2]))):
        came, told = call(tf.fill([3], rank))
        assert came.numpy().tolist() == sorted([0, 1] * (rank + 1))
        assert told.numpy().tolist() == [rank + 1] * 2
    for call in both_ways(lambda t: hvd.reducescatter(t, op=hvd.Sum)):
        assert call(tf.range(3)).numpy().tolist() == [[0, 2], [4]][rank]
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == [0, 1]


def check_gradients() -> None:
    rank = hvd.rank()
    calls = {
        "allreduce": (lambda t: hvd.allreduce(t, op=hvd.Sum), [3.0, 3.0]),
        "broadcast": (lambda t: hvd.broadcast(t, 0), [1.5, 1.5] if rank == 0 else [0.0, 0.0]),
        "allgather": (hvd.allgather, [1.5, 1.5]),
        "alltoall": (hvd.alltoall, [1.0, 2.0]),
        "reducescatter": (lambda t: hvd.reducescatter(t, op=hvd.Sum), [2.0, 4.0]),
    }
    for name, (call, want) in calls.items():
        for way in both_ways(call):
            x = tf.constant([1.0, 2.0])
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(way(x)) * (rank + 1)
            assert tape.gradient(loss, x).numpy().tolist() == want, name


def check_training() -> None:
    """Variables are bit-equal, and those of one device; inside `tf.function` and outside."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(2, 4, 3)), draw.normal(size=(2, 4, 1))
    for traced in (False, True):
        kernel, table = tf.Variable(np.full((3, 1), 0.1 * hvd.rank())), tf.Variable(np.ones((4, 1)))
        unused = tf.Variable(1.0)
        hvd.broadcast_variables([kernel, table], root_rank=0)

        def step(inputs: Any, target: Any, kernel: Any = kernel, table: Any = table,
                 unused: Any = unused) -> None:  # fmt: skip
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                rows = tf.gather(table, [0, hvd.rank() + 1])
                loss = tf.reduce_mean((inputs @ kernel - target) ** 2) + tf.reduce_sum(rows**2)
            grads = tape.gradient(loss, [kernel, table, unused])
            assert grads[2] is None
            kernel.assign_sub(0.1 * grads[0])
            table.assign_sub(0.1 * tf.convert_to_tensor(grads[1]))

        run = tf.function(step) if traced else step
        expected = np.zeros((3, 1))
        for _ in range(3):
            run(x[hvd.rank()], y[hvd.rank()])
            inputs, target = x.reshape(8, 3), y.reshape(8, 1)
            expected -= 0.1 * inputs.T @ (inputs @ expected - target) * 2 / 8
        np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-10)
        np.testing.assert_allclose(table.numpy()[:, 0], [0.512, 0.729, 0.729, 1.0])
        for one in (kernel, table):
            both = hvd.allgather(one[tf.newaxis]).numpy()
            np.testing.assert_array_equal(both[0], both[1])


def check_variables() -> None:
    """The root's values, also from inside a step, as Horovod's examples do after the first."""
    every = [
        tf.constant(value, dtype)
        for value, dtype in (
            ([[1, 2]], tf.float32), (3, tf.float64), ([4], tf.int64), ([7, 8], tf.uint32),
            ([True], tf.bool), (np.zeros((0, 2)), tf.float16), ([1.5], tf.bfloat16),
        )
    ]  # fmt: skip
    for traced, inplace in itertools.product((False, True), repeat=2):
        mine = [tf.Variable(one if hvd.rank() else tf.zeros_like(one)) for one in every]

        def step(first: int, mine: Any = mine, inplace: Any = inplace) -> Any:
            mine[0].assign_add([[10.0, 10.0]])
            if first:
                hvd.broadcast_variables(mine, root_rank=1, inplace=inplace)
                hvd.broadcast_variables([], root_rank=1)
            return mine[0] + 1

        run = tf.function(step) if traced else step
        assert [run(first).numpy().tolist() for first in (1, 0)] == [[[12, 13]], [[22, 23]]]
        for one, want in zip(mine[1:], every[1:], strict=True):
            np.testing.assert_array_equal(one, want)


def check_graphs_of_tensorflow_1() -> None:
    """They keep no order, so ranks would add what does not belong together."""
    calls: tuple[Callable[[Any], Any], ...] = (
        hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter,
        lambda x: hvd.broadcast(x, 0), lambda x: hvd.allreduce(tf.IndexedSlices(x, [0, 1])),
        lambda x: hvd.broadcast_variables([x], 0),
    )  # fmt: skip
    for call in calls:
        with tf.Graph().as_default():
            try:
                call(tf.ones(2))
            except NotImplementedError as error:
                assert "tf.function" in str(error), error
            else:
                raise AssertionError("not refused")


def check_mismatch() -> None:
    for call in both_ways(hvd.allreduce):
        try:
            call(tf.zeros(2 + hvd.rank()))
        except (hvd.HorovodInternalError, tf.errors.OpError) as error:
            assert "rank 0 has (2,), rank 1 has (3,)" in str(error), error
        else:
            raise AssertionError("not refused")
        assert float(hvd.allreduce(tf.ones([]), op=hvd.Sum)) == 2
    hvd.join()


if __name__ == "__main__":
    hvd.init()
    check_collectives()
    check_gradients()
    check_training()
    check_variables()
    check_graphs_of_tensorflow_1()
    check_mismatch()
    print(f"all is well on TensorFlow {tf.__version__}")  # noqa: T201 - heard by the test
