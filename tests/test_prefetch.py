"""jaxtrain/prefetch.py: batches on the devices ahead of time, in order, and a thread that always ends."""

import gc
import itertools
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxtrain.data.pipeline import Batches
from jaxtrain.prefetch import DevicePrefetch, to_devices


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "jaxtrain-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert wait_for(lambda: not prefetch_threads())


def identity(item):
    return item


# -- order, depth, position --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 4, 64])
def test_order_and_end(depth):
    with DevicePrefetch(range(50), lambda i: i * 10, depth) as prefetch:
        items = list(prefetch)
        assert [result for result, _ in items] == [i * 10 for i in range(50)]
        assert all(waited >= 0 for _, waited in items)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(prefetch)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_made_ahead_is_exactly_depth(depth):
    made = []
    with DevicePrefetch(itertools.count(), made.append, depth) as prefetch:
        for consumed in range(4):
            assert wait_for(lambda consumed=consumed: len(made) == consumed + depth)
            time.sleep(0.02)
            assert len(made) == consumed + depth
            next(prefetch)


def test_depth_0_makes_nothing_ahead_and_has_no_thread():
    made = []
    with DevicePrefetch(itertools.count(), made.append, 0) as prefetch:
        assert not prefetch_threads()
        for consumed in range(4):
            assert len(made) == consumed
            next(prefetch)


def test_seconds_waited_is_the_time_that_input_held_up_the_consumer():
    def slow(item):
        time.sleep(0.1)
        return item

    with DevicePrefetch(range(3), slow, 0) as prefetch:
        assert next(prefetch)[1] >= 0.1
    with DevicePrefetch(range(3), slow, 1) as prefetch:
        assert wait_for(lambda: len(prefetch._ahead._ready) == 1)
        assert next(prefetch)[1] < 0.09


def test_negative_depth():
    with pytest.raises(ValueError, match="prefetch depth -1: must be at least 0"):
        DevicePrefetch(range(3), identity, -1)


class Rows:
    def __len__(self):
        return 100

    def __getitem__(self, row):
        return {"row": np.int32(row)}


@pytest.mark.parametrize("depth", [0, 1, 4, 64])
@pytest.mark.parametrize("pause_s", [0, 0.1])
def test_data_04_prefetched_but_not_consumed_is_read_again(depth, pause_s):
    sharding = SingleDeviceSharding(jax.devices()[0])
    batches, position, seen = Batches(Rows(), 5, seed=0, shuffle=False), 0, []
    with DevicePrefetch(batches.at(position), lambda b: to_devices(b, sharding), depth) as prefetch:
        for batch, _ in itertools.islice(prefetch, 3):
            seen += batch["row"].tolist()
            position += 5
        time.sleep(pause_s)
    resumed = Batches(Rows(), 5, seed=0, shuffle=False)
    with DevicePrefetch(resumed.at(position), lambda b: to_devices(b, sharding), 1) as prefetch:
        batch, _ = next(prefetch)
    assert seen == list(range(15))
    assert batch["row"].tolist() == [15, 16, 17, 18, 19]


def test_data_05_position_is_restored_through_shuffle_prefetch_and_epochs():
    """Cut after each batch of 5 epochs, each time with another depth: the rest is what an uncut run sees."""

    def run(position, count, depth):
        with DevicePrefetch(Batches(Rows(), 30, seed=4).at(position), identity, depth) as prefetch:
            return [batch["row"].tolist() for batch, _ in itertools.islice(prefetch, count)]

    reference = run(0, 17, 2)
    for cut in range(17):
        assert run(30 * cut, 17 - cut, cut % 4) == reference[cut:]


def test_the_thread_rests_from_take_until_ahead():
    made = []
    with DevicePrefetch(itertools.count(), lambda item: made.append(item) or item, 1) as prefetch:
        assert wait_for(lambda: made == [0])  # the first is made at once
        assert prefetch.take()[0] == 0
        time.sleep(0.2)
        assert made == [0]
        prefetch.ahead()
        assert wait_for(lambda: made == [0, 1])
        assert prefetch.take()[0] == 1
        assert prefetch.take()[0] == 2  # nothing is ready: take itself wakes it
        assert next(prefetch)[0] == 3
        assert wait_for(lambda: made == [0, 1, 2, 3, 4])


# -- errors ------------------------------------------------------------------------------------------------------------


def broken_source():
    yield 1
    yield 2
    raise OSError("disk gone")


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_error_of_the_source_comes_after_the_good_batches_with_its_traceback(depth):
    with DevicePrefetch(broken_source(), identity, depth) as prefetch:
        assert [next(prefetch)[0] for _ in range(2)] == [1, 2]
        for _ in range(2):  # it stays: a caught error must not look like the end of the data
            with pytest.raises(OSError, match="disk gone") as caught:
                next(prefetch)
            names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert names.count("broken_source") == 1


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_of_put(depth, error):
    def put(item):
        if item == 2:
            raise error("no room")
        return item

    with DevicePrefetch(range(5), put, depth) as prefetch:
        assert [next(prefetch)[0] for _ in range(2)] == [0, 1]
        with pytest.raises(error, match="no room"):
            next(prefetch)


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_iteration_in_put_is_an_error_not_the_end(depth):
    with (
        DevicePrefetch(range(5), lambda item: next(iter(())), depth) as prefetch,
        pytest.raises(RuntimeError, match="StopIteration"),
    ):
        next(prefetch)


# -- ending the thread -------------------------------------------------------------------------------------------------


class Closable:
    def __init__(self):
        self.closed_by = []

    def __iter__(self):
        return self

    def __next__(self):
        return 0

    def close(self):
        self.closed_by.append(threading.current_thread())


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_close_while_the_buffer_is_full_ends_thread_and_source(depth):
    items = Closable()
    prefetch = DevicePrefetch(items, identity, depth)
    next(prefetch)
    assert wait_for(lambda: len(prefetch._ahead._ready) == depth)
    begin = time.monotonic()
    prefetch.close()
    assert time.monotonic() - begin < 2
    assert not prefetch_threads()
    assert len(items.closed_by) == 1
    prefetch.close()
    assert len(items.closed_by) == 1
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetch)


def test_close_while_the_source_hangs_returns_and_the_thread_ends_later():
    release, hangs = threading.Event(), threading.Event()

    def hanging():
        yield 0
        hangs.set()
        release.wait(60)
        yield 1

    prefetch = DevicePrefetch(hanging(), identity, 1)
    assert next(prefetch)[0] == 0
    assert hangs.wait(20)
    begin = time.monotonic()
    prefetch.close(timeout_s=0.1)
    assert time.monotonic() - begin < 2
    assert prefetch_threads()
    release.set()
    assert wait_for(lambda: not prefetch_threads())


def test_close_from_another_thread_wakes_a_waiting_consumer():
    release = threading.Event()
    prefetch = DevicePrefetch(iter(release.wait, None), identity, 1)
    closer = threading.Timer(0.1, lambda: prefetch.close(timeout_s=0.1))
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetch)
    closer.join()
    release.set()


def test_with_closes_on_an_error_of_the_loop():
    with pytest.raises(ZeroDivisionError), DevicePrefetch(itertools.count(), identity, 2) as prefetch:
        _ = 1 / next(prefetch)[0]
    assert not prefetch_threads()


def test_dropping_it_ends_the_thread():
    items = Closable()
    prefetch = DevicePrefetch(items, identity, 2)
    next(prefetch)
    del prefetch
    gc.collect()
    assert wait_for(lambda: not prefetch_threads())
    assert len(items.closed_by) == 1


def test_results_are_not_kept_alive():
    """A batch held by the thread would be device memory for nothing."""
    import weakref

    class Result:
        pass

    results = []

    def put(item):
        result = Result()
        results.append(weakref.ref(result))
        return result

    with DevicePrefetch(range(3), put, 4) as prefetch:
        for _ in range(3):
            next(prefetch)
        with pytest.raises(StopIteration):
            next(prefetch)
        gc.collect()
        assert [ref() for ref in results] == [None] * 3


@pytest.mark.parametrize("state", ["full", "inside put", "hanging", "reading"])
def test_interpreter_exits_with_a_prefetch_open(state):
    script = f"""
        import itertools, time, jax, numpy as np
        from jaxtrain.data.pipeline import Batches
        from jaxtrain.prefetch import DevicePrefetch, to_devices

        class Rows:
            def __len__(self): return 100
            def __getitem__(self, row):
                time.sleep(0.001)
                return {{"row": np.full(1000, row, np.int32)}}

        def hanging():
            yield {{"row": np.zeros(3, np.int32)}}
            time.sleep(1000)

        state = {state!r}
        items = hanging() if state == "hanging" else Batches(Rows(), 5, seed=0).at(0)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        def put(batch):
            if state == "inside put":
                time.sleep(0.5)
            return to_devices(batch, sharding)
        prefetch = DevicePrefetch(items, put, 100 if state == "reading" else 1)
        print(next(prefetch)[0]["row"].shape)
        if state == "full":
            time.sleep(0.5)
    """
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("(")
    assert time.monotonic() - begin < 60


# -- to_devices --------------------------------------------------------------------------------------------------------


def aligned(array):
    """A copy whose buffer begins at a multiple of 64 bytes, which is what CPU device_put takes over as it is."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    view = raw[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize("devices", [1, 8])
def test_a_later_change_of_the_host_array_never_reaches_the_device(devices):
    sharding = NamedSharding(Mesh(jax.devices()[:devices], ("data",)), PartitionSpec("data"))
    host = aligned(np.arange(8 * 1024, dtype=np.int32).reshape(8, 1024))
    batch = to_devices({"x": host}, sharding)
    expected = host.copy()
    host[...] = -1
    np.testing.assert_array_equal(batch["x"], expected)


def test_values_shardings_and_dtypes():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    window = NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))
    host = {
        "tokens": np.arange(16 * 3, dtype=np.int32).reshape(16, 3),
        "weights": np.linspace(0, 1, 16, dtype=np.float32),
        "window": np.arange(2 * 8 * 3, dtype=np.int32).reshape(2, 8, 3),
    }
    batch = to_devices(host, {"tokens": rows, "weights": rows, "window": window})
    for name, leaf in host.items():
        np.testing.assert_array_equal(batch[name], leaf)
        assert batch[name].dtype == leaf.dtype
    assert batch["tokens"].sharding == rows
    assert batch["tokens"].addressable_shards[0].data.shape == (2, 3)
    assert batch["window"].addressable_shards[0].data.shape == (2, 1, 3)
    again = to_devices(batch["tokens"], NamedSharding(mesh, PartitionSpec()))  # a device array stays on the devices
    np.testing.assert_array_equal(again, host["tokens"])


def test_placing_a_nan_is_not_computing_one():
    host = np.array([1, np.nan], np.float32)
    with jax.debug_nans(True):
        batch = to_devices({"x": host}, SingleDeviceSharding(jax.devices()[0]))
    np.testing.assert_array_equal(batch["x"], host)


def test_rows_that_do_not_divide_name_the_leaf():
    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
    with pytest.raises(ValueError, match=r"inputs/tokens: \(12, 2\) does not fit its sharding: [\s\S]*8 times"):
        to_devices({"inputs": {"tokens": np.zeros((12, 2), np.int32)}}, sharding)


def test_two_processes_make_one_global_batch_in_the_order_of_one_process():
    script = """
        import sys, jax, numpy as np
        jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from jaxtrain.data.pipeline import Batches
        from jaxtrain.prefetch import DevicePrefetch, to_devices

        class Rows:
            def __len__(self): return 50
            def __getitem__(self, row): return {"row": np.array([row, row], np.int32)}

        assert (jax.process_count(), len(jax.devices()), len(jax.local_devices())) == (2, 4, 2)
        sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
        whole = Batches(Rows(), 8, seed=3)
        mine = Batches(Rows(), 8, seed=3, process_index=jax.process_index(), process_count=2)
        with DevicePrefetch(mine.at(40), lambda b: to_devices(b, {"row": sharding}), 2) as prefetch:
            for n in range(5):
                array = next(prefetch)[0]["row"]
                assert array.shape == (8, 2)
                expected = np.array(whole.row_indices(40 + 8 * n))
                assert len(array.addressable_shards) == 2
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data)[:, 1], expected[shard.index[0]])
        print("same", jax.process_index())
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), address, str(p)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for p in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for p, (output, errors) in enumerate(outputs):
        assert output == f"same {p}\n", errors
