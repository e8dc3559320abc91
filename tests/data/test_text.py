"""jaxtrain/data/text.py: which files, which side, which tokens, which rows."""

import time
import zlib

import numpy as np
import pytest

from jaxtrain.data.text import DOCUMENT_START, VOCAB_SIZE, RowTable, load_text, token_stream


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def texts(stream):
    """The documents of a stream, by a loop."""
    documents = []
    for token in stream.tolist():
        if token == DOCUMENT_START:
            documents.append(bytearray())
        else:
            documents[-1].append(token)
    return [bytes(d) for d in documents]


MANY = {f"d{i % 3}/f{i}.txt": f"document {i} " * (1 + i) for i in range(40)}


# -- which files ---------------------------------------------------------------------------------------------------


def test_directory_glob_and_file_name_documents_relative_to_their_root(tmp_path):
    write(
        tmp_path, {"b/two.txt": "2", "a.md": "1", "b/c/three.py": "3", "no.bin": "4", ".git/x.txt": "5", ".h.txt": "6"}
    )
    whole = load_text(tmp_path, held_out_fraction=0)
    assert whole.train_documents == ("a.md", "b/c/three.py", "b/two.txt")
    assert texts(whole.train) == [b"1", b"3", b"2"]
    assert load_text(str(tmp_path / "**" / "*.txt"), held_out_fraction=0).train_documents == ("b/two.txt",)
    assert load_text(str(tmp_path / "b" / "**"), held_out_fraction=0).train_documents == ("c/three.py", "two.txt")
    assert load_text([tmp_path / "no.bin"], held_out_fraction=0).train_documents == ("no.bin",)
    assert load_text(tmp_path, suffixes=[".bin"], held_out_fraction=0).train_documents == ("no.bin",)


def test_a_file_with_glob_characters_in_its_name_is_itself(tmp_path):
    write(tmp_path, {"x[1].txt": "brackets", "x1.txt": "none"})
    assert texts(load_text(tmp_path / "x[1].txt", held_out_fraction=0).train) == [b"brackets"]


def test_order_is_by_name_whatever_the_order_of_patterns(tmp_path):
    write(tmp_path, {"a.txt": "1", "b.txt": "2", "c.txt": "3"})
    names = [str(tmp_path / n) for n in ("c.txt", "a.txt", "b.txt")]
    assert load_text(names, held_out_fraction=0).train_documents == ("a.txt", "b.txt", "c.txt")


def test_a_file_found_twice_is_read_once(tmp_path):
    write(tmp_path, {"a.txt": "1", "b.txt": "2"})
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    corpus = load_text([tmp_path, tmp_path / "a.txt", str(tmp_path / "*.txt")], held_out_fraction=0)
    assert sorted(texts(corpus.train)) == [b"1", b"2"]


def test_copies_cannot_cross_the_split(tmp_path):
    write(tmp_path, {f"{i:02}.txt": "the same licence" if i % 2 else f"text {i}" for i in range(20)})
    corpus = load_text(tmp_path, held_out_fraction=0.5)
    assert len(corpus.duplicates) == 9
    both = texts(corpus.train) + texts(corpus.held_out)
    assert len(both) == len(set(both)) == 11


def test_empty_files_are_no_documents(tmp_path):
    write(tmp_path, {"a.txt": "", "b.txt": "x", "c.txt": ""})
    corpus = load_text(tmp_path, held_out_fraction=0)
    assert corpus.train_documents == ("b.txt",)
    assert corpus.duplicates == ()


def test_not_utf8_names_file_offset_and_remedy(tmp_path):
    write(tmp_path, {"good.txt": "é", "latin.txt": b"abc\xe9 def", "fine.txt": "x"})
    with pytest.raises(
        ValueError, match=r"latin\.txt: not UTF-8 at byte offset 3 \(byte 0xe9\); convert it, or drop it"
    ):
        load_text(tmp_path)
    corpus = load_text(tmp_path, skip_non_utf8=True, held_out_fraction=0)
    assert corpus.skipped == ("latin.txt",)
    assert texts(corpus.train) == [b"x", "é".encode()]
    assert "1 files not UTF-8" in str(corpus)


def test_nothing_found_is_one_sentence_with_the_pattern(tmp_path):
    write(tmp_path, {"a.txt": "x", "sub/b.bin": "y", "empty/c.txt": ""})
    with pytest.raises(ValueError, match=r"'.*\*\.md' matches no file"):
        load_text([tmp_path, str(tmp_path / "*.md")])
    with pytest.raises(ValueError, match=r"matches no file \(directories are searched for \.txt, \.md, \.rst, \.py\)"):
        load_text(tmp_path / "sub")
    with pytest.raises(ValueError, match=r"matches no file \(no directory .*nowhere"):
        load_text(tmp_path / "nowhere" / "a.txt")
    with pytest.raises(ValueError, match=r"data\.paths=\['.*empty'\]: no text found"):
        load_text(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"data\.paths is empty"):
        load_text([])


# -- which side ----------------------------------------------------------------------------------------------------


def test_split_is_by_crc32_of_the_relative_name_on_any_machine(tmp_path):
    write(tmp_path / "here", MANY)
    write(tmp_path / "elsewhere" / "deep", MANY)
    here = load_text(tmp_path / "here", held_out_fraction=0.25)
    there = load_text(str(tmp_path / "elsewhere" / "deep" / "**" / "*.txt"), held_out_fraction=0.25)
    expected = tuple(sorted(name for name in MANY if zlib.crc32(name.encode()) < 2**30))
    assert 0 < len(expected) < 40
    for corpus in (here, there):
        assert corpus.held_out_documents == expected
        assert sorted(corpus.train_documents + corpus.held_out_documents) == sorted(MANY)
        assert texts(corpus.held_out) == [MANY[name].encode() for name in expected]
    assert here.fingerprint == there.fingerprint


def test_split_does_not_move_when_other_documents_come_or_go(tmp_path):
    write(tmp_path, MANY)
    before = set(load_text(tmp_path, held_out_fraction=0.25).held_out_documents)
    write(tmp_path, {"new.txt": "another"})
    assert set(load_text(tmp_path, held_out_fraction=0.25).held_out_documents) - {"new.txt"} == before


@pytest.mark.parametrize("fraction", [1e-9, 0.05, 0.5, 0.999999])
def test_no_side_is_empty_from_two_documents_on(tmp_path, fraction):
    for count in range(2, 8):
        write(tmp_path, {f"{i}.txt": f"t{i}" for i in range(count)})
        corpus = load_text(tmp_path, held_out_fraction=fraction)
        assert corpus.train_documents
        assert corpus.held_out_documents
        assert len(corpus.train_documents) + len(corpus.held_out_documents) == count


def test_one_document_cannot_be_split(tmp_path):
    write(tmp_path, {"only.txt": "x"})
    with pytest.raises(ValueError, match=r"one document \(only\.txt\).*add a second file"):
        load_text(tmp_path)
    corpus = load_text(tmp_path, held_out_fraction=0)
    assert (corpus.train.size, corpus.held_out.size) == (2, 0)


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan")])
def test_fraction_out_of_range(fraction):
    with pytest.raises(ValueError, match="must be at least 0 and below 1"):
        load_text(held_out_fraction=fraction)


def test_fingerprint_sees_every_byte_name_and_side(tmp_path):
    write(tmp_path / "0", MANY)
    variants = [MANY | {"d0/f0.txt": "document 1 "}, MANY | {"d0/g.txt": "x"}]
    renamed = dict(MANY)
    renamed["d0/renamed.txt"] = renamed.pop("d0/f0.txt")
    moved = MANY | {"d0/f0.txt": "document 0", "d0/f3.txt": " " + MANY["d0/f3.txt"]}  # a byte crosses a boundary
    prints = [load_text(tmp_path / "0").fingerprint, load_text(tmp_path / "0", held_out_fraction=0.5).fingerprint]
    for number, files in enumerate([*variants, renamed, moved], 1):
        write(tmp_path / str(number), files)
        prints.append(load_text(tmp_path / str(number)).fingerprint)
    assert len(set(prints)) == 6
    assert load_text(tmp_path / "0").fingerprint == prints[0]


# -- the standard library --------------------------------------------------------------------------------------------


def test_stdlib_is_about_12_mb_without_tests_or_packages():
    begin = time.perf_counter()
    corpus = load_text()
    assert time.perf_counter() - begin < 20
    names = corpus.train_documents + corpus.held_out_documents
    assert 8e6 < corpus.train.size + corpus.held_out.size < 16e6
    assert 0.1e6 < corpus.held_out.size < 1.2e6
    assert {"ast.py", "asyncio/base_events.py", "json/decoder.py"} <= set(names)
    assert not [n for n in names if {"site-packages", "test", "tests", "idle_test"} & set(n.split("/")[:-1])]
    assert not [n for n in names if "_sysconfigdata" in n]
    assert load_text("stdlib").fingerprint == corpus.fingerprint


def test_stdlib_skips_what_is_not_utf8_and_counts_it(tmp_path, monkeypatch):
    write(tmp_path, {"a.py": "1", "b.py": b"\xff", "c.py": "2", "test/d.py": "3", "e.txt": "4"})
    monkeypatch.setattr("jaxtrain.data.text.sysconfig.get_path", lambda name: str(tmp_path))
    corpus = load_text(held_out_fraction=0)
    assert (corpus.train_documents, corpus.skipped) == (("a.py", "c.py"), ("b.py",))


# -- tokens and rows -------------------------------------------------------------------------------------------------


def test_vocabulary_divides_by_tensor_parallel_sizes():
    assert VOCAB_SIZE > DOCUMENT_START
    assert all(VOCAB_SIZE % n == 0 for n in (2, 4, 8, 16, 32, 64))


def test_stream_of_documents():
    stream = token_stream([b"ab", b"", b"\x00\xff"])
    assert stream.dtype == np.uint16
    assert stream.tolist() == [256, 97, 98, 256, 0, 255]
    assert not stream.flags.writeable
    assert token_stream([]).size == 0


def test_rows_by_hand():
    table = RowTable(token_stream([b"ab", b"c", b"de"]), 4)  # 256 a b 256 | c 256 d (e)
    assert len(table) == 2
    first, last = table[0], table[1]
    assert {k: v.tolist() for k, v in first.items()} == {
        "tokens": [256, 97, 98, 256],
        "targets": [97, 98, 256, 99],
        "positions": [0, 1, 2, 0],
        "segment_ids": [1, 1, 1, 2],
        "weights": [1, 1, 0, 1],
    }
    assert {k: v.tolist() for k, v in last.items()} == {
        "tokens": [99, 256, 100, 256],
        "targets": [256, 100, 101, 256],
        "positions": [0, 0, 1, 0],
        "segment_ids": [1, 2, 2, 0],
        "weights": [0, 1, 1, 0],
    }
    assert {k: v.dtype.name for k, v in first.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "positions": "int32",
        "segment_ids": "int32",
        "weights": "float32",
    }


def slow_rows(stream, length):
    """The rows, token by token."""
    rows = []
    for begin in range(0, len(stream) - 1, length):
        row = {k: [] for k in ("tokens", "targets", "positions", "segment_ids", "weights")}
        position, segment = -1, 1
        for at in range(begin, begin + length):
            padding = at + 1 >= len(stream)
            token, target = (DOCUMENT_START, DOCUMENT_START) if padding else (stream[at], stream[at + 1])
            position += 1
            if token == DOCUMENT_START:
                position = 0
                segment += at != begin
            row["tokens"].append(token)
            row["targets"].append(target)
            row["positions"].append(0 if padding else position)
            row["segment_ids"].append(0 if padding else segment)
            row["weights"].append(float(not padding and target != DOCUMENT_START))
        rows.append(row)
    return rows


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 11, 13, 29, 64, 97, 100, 101, 1000])
def test_every_byte_is_predicted_exactly_once_and_rows_equal_the_slow_version(length):
    generator = np.random.default_rng(length)
    documents = [generator.bytes(int(n)) for n in generator.integers(1, 30, 60)]
    stream = token_stream(documents)
    table = RowTable(stream, length)
    rows = [table[i] for i in range(len(table))]
    assert [{k: v.tolist() for k, v in row.items()} for row in rows] == slow_rows(stream.tolist(), length)
    order = generator.integers(0, len(table), 50)
    for name, leaf in table.read_rows(order).items():
        np.testing.assert_array_equal(leaf, [rows[i][name] for i in order])
    assert sum(row["weights"].sum() for row in rows) == sum(map(len, documents))
    predicted = b"".join(bytes(row["targets"][row["weights"] == 1].astype(np.uint8)) for row in rows)
    assert predicted == b"".join(documents)


def test_stdlib_weights_sum_to_the_bytes():
    corpus = load_text()
    table = RowTable(corpus.held_out, 777)
    total = sum(int(table[i]["weights"].sum()) for i in range(len(table)))
    assert total == corpus.held_out.size - len(corpus.held_out_documents)


def test_rows_are_fresh_arrays():
    stream = token_stream([b"abcdef"])
    table = RowTable(stream, 3)
    for leaf in table[0].values():
        leaf[:] = 9
    assert table[0]["tokens"].tolist() == [256, 97, 98]
    assert stream.tolist() == [256, 97, 98, 99, 100, 101, 102]


def test_row_table_refuses_what_it_cannot_cut():
    stream = token_stream([b"abcdef"])
    table = RowTable(stream, 3)
    for row in (-1, 2):
        with pytest.raises(IndexError, match=f"row {row} of a table of 2 rows"):
            table[row]
    with pytest.raises(ValueError, match="sequence_length=0: must be at least 1"):
        RowTable(stream, 0)
    with pytest.raises(ValueError, match="holds no text"):
        RowTable(token_stream([]), 3)
    with pytest.raises(ValueError, match="begins with DOCUMENT_START=256, not 97"):
        RowTable(stream[1:], 3)
    with pytest.raises(ValueError, match=r"not float64 of shape \(1, 7\)"):
        RowTable(stream[None].astype(float), 3)
