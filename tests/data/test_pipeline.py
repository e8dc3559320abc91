"""jaxtrain/data/pipeline.py: one global sample index, whatever the processes, threads and read-ahead."""

import itertools
import threading
import time

import numpy as np
import pytest

from jaxtrain.data.pipeline import Batches, InOrder, evenly_spaced
from jaxtrain.data.text import RowTable, token_stream


class Rows:
    """A source whose row i is the number i (and some structure)."""

    def __init__(self, count, delay=None):
        self.count = count
        self.delay = delay

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        if not 0 <= row < self.count:
            raise IndexError(row)
        if self.delay is not None:
            time.sleep(self.delay(row))
        return {"row": np.int32(row), "pair": np.array([row, -row], np.float32), "weights": np.float32(1)}


def take(iterator, count):
    return [batch["row"].tolist() for batch in itertools.islice(iterator, count)]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def rows_from(batches, sample_index, count):
    return take(batches.at(sample_index), count)


def test_leaves_are_stacked_with_their_types():
    batch = next(Batches(Rows(10), 4, seed=0, shuffle=False).at(2))
    assert batch["row"].dtype == np.int32
    assert batch["row"].tolist() == [2, 3, 4, 5]
    assert batch["pair"].dtype == np.float32
    assert batch["pair"].tolist() == [[2, -2], [3, -3], [4, -4], [5, -5]]


def test_unshuffled_epochs_follow_each_other_across_a_batch():
    assert rows_from(Batches(Rows(5), 3, seed=0, shuffle=False), 0, 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 97, 1000])
def test_each_epoch_is_a_permutation(count):
    batches = Batches(Rows(count), 1, seed=7)
    for epoch in range(4):
        order = [batches.row_indices(epoch * count + i)[0] for i in range(count)]
        assert sorted(order) == list(range(count))


def test_data_06_cut_anywhere_and_epochs_differ():
    def batches():
        return Batches(Rows(10), 2, seed=1)

    reference = rows_from(batches(), 0, 20)
    for cut in range(20):
        assert rows_from(batches(), 2 * cut, 20 - cut) == reference[cut:]
    epochs = [tuple(flat(reference[5 * e : 5 * e + 5])) for e in range(4)]
    assert len(set(epochs)) == 4
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)


def test_data_06_cut_inside_an_epoch_that_batches_cross():
    reference = flat(rows_from(Batches(Rows(7), 3, seed=1), 0, 14))
    for cut in range(30):  # any sample index, not only multiples of the micro-batch
        assert flat(rows_from(Batches(Rows(7), 3, seed=1), cut, 4)) == reference[cut : cut + 12]


def test_order_is_pinned():
    """A checkpoint's position means these rows: a grain that draws others needs a new checkpoint format."""
    batches = Batches(Rows(12), 6, seed=0)
    assert [batches.row_indices(s) for s in (0, 6, 12, 18)] == ORDER_OF_SEED_0


ORDER_OF_SEED_0 = [[1, 2, 11, 5, 9, 7], [10, 6, 0, 3, 8, 4], [9, 11, 1, 8, 2, 0], [3, 5, 4, 7, 6, 10]]


def test_neighbouring_seeds_share_no_epoch():
    """grain's shuffle alone orders epoch e of seed s by s + e: epoch 1 of seed 0 would be epoch 0 of seed 1."""
    sources = {seed: Batches(Rows(50), 50, seed=seed) for seed in range(6)}
    orders = [tuple(batches.row_indices(50 * epoch)) for batches in sources.values() for epoch in range(6)]
    assert len(set(orders)) == 36


def test_a_far_index_costs_nothing_and_is_exact_beyond_2_63():
    batches = Batches(Rows(1000), 8, seed=3)
    for sample_index in (2**31 + 5, 2**62 + 1, 2**70 + 3):
        expected = [batches.row_indices(sample_index + 8 * n) for n in range(3)]
        begin = time.perf_counter()
        assert rows_from(batches, sample_index, 3) == expected
        assert time.perf_counter() - begin < 2
        epoch = [batches.row_indices(sample_index // 1000 * 1000 + 8 * n) for n in range(125)]
        assert sorted(flat(epoch)) == list(range(1000))


def test_data_01_position_restored():
    """Each of the 40 rows exactly once, however the run is cut."""

    def run(position, steps):
        iterator, seen = Batches(Rows(40), 4, seed=5).at(position), []
        for _ in range(steps):
            seen += next(iterator)["row"].tolist()
            position += 4
        return seen, position

    whole, _ = run(0, 10)
    assert sorted(whole) == list(range(40))
    for cut in range(10):
        before, position = run(0, cut)
        after, _ = run(position, 10 - cut)
        assert before + after == whole


def test_data_02_position_counts_samples_not_steps_or_micro_batches():
    batches, accumulation, steps = Batches(Rows(240), 2, seed=0, shuffle=False), 4, 10
    iterator, position = batches.at(0), 0
    for _ in range(steps):
        for _ in range(accumulation):
            next(iterator)
            position += batches.micro_batch_size
    assert position == 80
    assert rows_from(batches, position, 1) == [[80, 81]]


def test_data_08_resume_right_after_resume():
    reference = rows_from(Batches(Rows(23), 2, seed=2), 0, 40)
    for taken in range(9):
        position = 20 + 2 * len(rows_from(Batches(Rows(23), 2, seed=2), 20, taken))
        assert rows_from(Batches(Rows(23), 2, seed=2), position, 10) == reference[10 + taken : 20 + taken]


def test_data_09_threads_and_buffer_do_not_change_the_order():
    def delay(row):  # later rows come sooner
        return 0.004 if row % 4 == 0 else 0

    reference = rows_from(Batches(Rows(40), 2, seed=1, threads=0), 0, 30)
    for threads, buffer in ((0, 1), (1, 1), (2, 5), (5, 2), (5, 20)):
        batches = Batches(Rows(40, delay), 2, seed=1, threads=threads, buffer=buffer)
        assert rows_from(batches, 6, 20) == reference[3:23]


def test_threads_read_at_once():
    barrier = threading.Barrier(3, timeout=30)

    def delay(row):
        barrier.wait()
        return 0

    assert rows_from(Batches(Rows(12, delay), 1, seed=0, shuffle=False, threads=3, buffer=3), 0, 3) == [[0], [1], [2]]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 12])
def test_process_count_does_not_change_the_order(processes):
    reference = rows_from(Batches(Rows(50), 12, seed=9), 24, 8)
    parts = [
        rows_from(Batches(Rows(50), 12, seed=9, process_index=p, process_count=processes), 24, 8)
        for p in range(processes)
    ]
    assert all(len(batch) == 12 // processes for part in parts for batch in part)
    assert [flat(batch) for batch in zip(*parts, strict=True)] == reference


def test_data_11_uneven_rows_in_training_are_all_used():
    """10 rows on 4 processes: batches cross epochs, so no row is dropped and no process has a batch more."""
    batches = [Batches(Rows(10), 4, seed=0, process_index=p, process_count=4) for p in range(4)]
    seen = flat(flat(rows_from(b, 0, 20)) for b in batches)
    assert sorted(seen) == sorted(list(range(10)) * 8)


def test_data_11_uneven_rows_in_order_are_padded_alike_on_each_process():
    parts = [list(InOrder(Rows(10), 4, process_index=p, process_count=4)) for p in range(4)]
    assert [len(part) for part in parts] == [3, 3, 3, 3]
    assert sum(batch["weights"].sum() for part in parts for batch in part) == 10
    for p in (2, 3):
        padding = parts[p][2]
        assert {k: v.tolist() for k, v in padding.items()} == {"row": [0], "pair": [[0, 0]], "weights": [0]}
        assert {k: v.dtype for k, v in padding.items()} == {k: v.dtype for k, v in parts[p][0].items()}


@pytest.mark.parametrize(("processes", "per_process"), [(1, 10), (4, 1), (4, 2), (4, 16)])
def test_data_12_padding_counts_for_nothing(processes, per_process):
    right = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    total = weight = 0
    for p in range(processes):
        for batch in InOrder(Rows(10), processes * per_process, process_index=p, process_count=processes):
            total += (right[batch["row"]] * batch["weights"]).sum()
            weight += batch["weights"].sum()
    assert (total / weight, weight) == (pytest.approx(0.9), 10)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_data_02_a_window_at_a_time_is_its_micro_batches(processes, threads):
    """Same rows in the same order, whoever stacks them; the position counts samples all the same."""
    for process in range(processes):
        split = {"process_index": process, "process_count": processes, "seed": 5, "threads": threads}
        one, windows = Batches(Rows(30), 4, **split), Batches(Rows(30), 4, stack=3, **split)
        for position in (0, 12, 8, 1):
            singles, stacks = one.at(position), windows.at(position)
            for _ in range(4):  # over the end of an epoch
                window = next(stacks)
                wanted = [next(singles) for _ in range(3)]
                assert window.keys() == wanted[0].keys()
                for name, leaf in window.items():
                    assert leaf.shape[:2] == (3, 4 // processes)
                    np.testing.assert_array_equal(leaf, np.stack([batch[name] for batch in wanted]))


def test_in_order_can_be_read_again_and_knows_its_length():
    batches = InOrder(Rows(7), 3)
    assert len(batches) == 3
    assert [take(batches, 9) for _ in range(2)] == [[[0, 1, 2], [3, 4, 5], [6, 0, 0]]] * 2
    assert len(list(InOrder(Rows(6), 3))) == len(InOrder(Rows(6), 3)) == 2


def test_packed_text_in_order_predicts_every_byte_once():
    documents = [b"some text", b"more", b"x" * 100]
    table = RowTable(token_stream(documents), 7)
    assert len(table) % 4
    assert sum(batch["weights"].sum() for batch in InOrder(table, 4)) == sum(map(len, documents))


@pytest.mark.parametrize(
    ("count", "rows", "expected"),
    [(10, 5, [0, 2, 4, 6, 8]), (10, 3, [0, 3, 6]), (10, 1, [0]), (3, 3, [0, 1, 2]), (3, 99, [0, 1, 2])],
)
def test_evenly_spaced_rows(count, rows, expected):
    few = evenly_spaced(Rows(count), rows)
    assert len(few) == len(expected)
    assert flat(take(InOrder(few, 1), 99)) == expected
    with pytest.raises(IndexError):
        few[len(few)]


def test_a_stack_is_one_or_more():
    with pytest.raises(ValueError, match=r"stack=0 micro-batches: must be at least 1, or None"):
        Batches(Rows(30), 4, seed=0, stack=0)


def test_bad_sizes_say_the_numbers_and_the_remedy():
    with pytest.raises(ValueError, match="10 rows is not divisible by 4 processes; the nearest is 8 or 12"):
        Batches(Rows(100), 10, seed=0, process_count=4)
    with pytest.raises(ValueError, match="3 rows is not divisible by 4 processes; the nearest is 4"):
        InOrder(Rows(100), 3, process_count=4)
    with pytest.raises(ValueError, match="holds 3 rows, fewer than one micro-batch of 4; add data, shorten"):
        Batches(Rows(3), 4, seed=0)
    with pytest.raises(ValueError, match="batch size 0: must be at least 1"):
        Batches(Rows(3), 0, seed=0)
    with pytest.raises(ValueError, match="process 2 of 2"):
        Batches(Rows(3), 2, seed=0, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="seed=-1: must not be negative"):
        Batches(Rows(3), 1, seed=-1)
    with pytest.raises(ValueError, match="sample index -2: must not be negative"):
        Batches(Rows(3), 1, seed=0).at(-2)
    with pytest.raises(ValueError, match="threads=-1, buffer=4"):
        Batches(Rows(3), 1, seed=0, threads=-1)
    with pytest.raises(ValueError, match="4294967296 rows; grain shuffles up to"):
        Batches(Rows(2**32), 1, seed=0)
    with pytest.raises(ValueError, match="0 rows of a source"):
        evenly_spaced(Rows(3), 0)
    with pytest.raises(ValueError, match="holds no rows"):
        InOrder(Rows(0), 1)


def test_padding_needs_weights():
    class Unweighted(Rows):
        def __getitem__(self, row):
            return {"row": np.int32(row)}

    with pytest.raises(ValueError, match=r"10 rows are padded with 2 .* no leaf 'weights' .*\['row'\]"):
        InOrder(Unweighted(10), 4)
    assert len(list(InOrder(Unweighted(10), 5))) == 2


def test_rows_that_disagree_name_the_leaf_and_the_rows():
    class Ragged(Rows):
        def __getitem__(self, row):
            return {"x": np.zeros(2 if row < 3 else 5)} if row < 4 else {"y": np.zeros(2)}

    batches = Batches(Ragged(5), 2, seed=0, shuffle=False, threads=0)
    with pytest.raises(
        ValueError, match=r"leaf 'x' is float64 \(5,\) in row 3 of the source, but float64 \(2,\) in row 2"
    ):
        next(batches.at(2))
    with pytest.raises(ValueError, match=r"row 4 of the source has the leaves \['y'\], row 3 has \['x'\]"):
        next(batches.at(3))


class Together(Rows):
    """The same rows, read several at once."""

    def __getitem__(self, row):
        raise AssertionError("read one by one")

    def read_rows(self, rows):
        if max(rows) >= self.count:
            raise IndexError(max(rows))
        one_by_one = [Rows.__getitem__(self, row) for row in rows]
        return {name: np.stack([row[name] for row in one_by_one]) for name in one_by_one[0]}


@pytest.mark.parametrize("threads", [0, 2])
def test_a_source_that_reads_rows_together_gives_the_same_batches(threads):
    def batches(source):
        return list(itertools.islice(Batches(source, 3, seed=5, threads=threads).at(7), 9))

    for one, other in zip(batches(Rows(10)), batches(Together(10)), strict=True):
        assert one.keys() == other.keys()
        for name, leaf in one.items():
            assert other[name].dtype == leaf.dtype
            np.testing.assert_array_equal(other[name], leaf)


@pytest.mark.parametrize(("processes", "rows"), [(1, 10), (2, 10), (4, 9)])
def test_rows_read_together_are_padded_and_spread_like_others(processes, rows):
    class First(Together):  # InOrder looks at row 0 for the padding
        def __getitem__(self, row):
            assert row == 0
            return Rows.__getitem__(self, row)

    for process in range(processes):
        options = {"process_index": process, "process_count": processes, "threads": 0}
        one = list(InOrder(evenly_spaced(Rows(30), rows), 8, **options))
        other = list(InOrder(evenly_spaced(First(30), rows), 8, **options))
        assert len(one) == len(other) == 2
        for a, b in zip(one, other, strict=True):
            assert {n: v.tolist() for n, v in a.items()} == {n: v.tolist() for n, v in b.items()}


def test_rows_read_together_need_their_leading_dim():
    class Flat(Rows):
        def read_rows(self, rows):
            return {"x": np.zeros(7)}

    with pytest.raises(ValueError, match=r"leaf 'x' of the source's read_rows\(2 rows\) has the shape \(7,\)"):
        next(Batches(Flat(5), 2, seed=0, threads=0).at(0))


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_the_source_reaches_the_reader_in_its_place(threads):
    def delay(row):
        if row == 5:
            raise OSError("disk gone at row 5")
        return 0

    iterator = Batches(Rows(12, delay), 2, seed=0, shuffle=False, threads=threads).at(0)
    assert take(iterator, 2) == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="disk gone at row 5"):
        next(iterator)


def test_closing_or_dropping_the_iterator_ends_its_threads():
    def alive():
        return {t for t in threading.enumerate() if t.name.startswith("grain-prefetch")}

    for end in ("close", "drop"):
        before = alive()  # of other tests, on their way out
        iterator = Batches(Rows(100), 2, seed=0, threads=3).at(0)
        next(iterator)
        assert alive() - before
        if end == "close":
            iterator.close()
        else:
            del iterator
        deadline = time.monotonic() + 20
        while alive() - before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive() - before
