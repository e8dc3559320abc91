"""A checkpoint is whole when every byte is as it was written: nothing else counts, and nothing is missed."""

import json
import pathlib
import random
import shutil

import google_crc32c
import pytest

from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.errors import MismatchError
from jaxtrain.checkpoint.files import Disk

FILES = {
    "state/d/0a": random.Random(0).randbytes(5000), "state/manifest.ocdbt": b"x", "state/_METADATA": b'{"a": 1}',
    "host_state/metadata": b"{}", "empty": b"", "deep/er/still": bytes(9),
}  # fmt: skip
LATER = ("_CHECKPOINT_METADATA", "commit_success.txt", "state/commit_success.txt")  # Orbax's, after the manifest


def write(directory: pathlib.Path) -> None:
    files = Disk(str(directory.parent))
    manifest.write(files, directory.name, manifest.entries(files, directory.name))


def problem(directory: pathlib.Path, **how: object) -> str | None:
    return manifest.problem(Disk(str(directory.parent)), directory.name, **how)


@pytest.fixture
def whole(tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / "7"
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    write(directory)
    return directory


def test_holds_path_size_and_crc32c_of_every_file(whole):
    files = json.loads((whole / "MANIFEST.json").read_text())["files"]
    assert files == {name: [len(content), google_crc32c.value(content)] for name, content in FILES.items()}


def test_crc32c_is_the_published_one(tmp_path):
    """RFC 3720, section B.4: CRC32C of 32 bytes of zeros is 8a 91 36 aa, of 32 bytes of ones 62 a8 ab 43."""
    (tmp_path / "zeros").write_bytes(bytes(32))
    (tmp_path / "ones").write_bytes(b"\xff" * 32)
    write(tmp_path)
    files = json.loads((tmp_path / "MANIFEST.json").read_text())["files"]
    assert files == {"zeros": [32, 0x8A9136AA], "ones": [32, 0x62A8AB43]}


def test_a_file_longer_than_a_chunk_is_read_to_its_end(tmp_path):
    content = bytearray(random.Random(1).randbytes((1 << 22) + 3))
    (tmp_path / "big").write_bytes(content)
    write(tmp_path)
    assert problem(tmp_path) is None
    content[-1] ^= 1
    (tmp_path / "big").write_bytes(content)
    assert problem(tmp_path).startswith("big: checksum ")


def test_whole_also_after_the_commit_and_after_a_copy(whole, tmp_path):
    assert problem(whole) is None
    for name in LATER:
        (whole / name).write_text("later")
    assert problem(whole) is None
    assert problem(shutil.copytree(whole, tmp_path / "copy")) is None  # CKPT-06


@pytest.mark.parametrize("name", [name for name, content in FILES.items() if content])
def test_any_flipped_bit_is_found(whole, name):
    content = FILES[name]
    every = range(8 * len(content))
    for bit in every if len(every) < 100 else random.Random(2).sample(every, 100):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (whole / name).write_bytes(damaged)
        crc = google_crc32c.value(bytes(damaged))
        assert problem(whole) == f"{name}: checksum {crc:08x}, {google_crc32c.value(content):08x} was written"


@pytest.mark.parametrize("name", FILES)
def test_length_absence_and_company_are_found(whole, name):
    path, size = whole / name, len(FILES[name])
    for other in {0, size - 1, size + 1} - {-1, size}:
        path.write_bytes((FILES[name] + b"\0")[:other])
        assert problem(whole) == f"{name}: {other} bytes, {size} were written"
    path.unlink()
    assert problem(whole) == f"{name}: missing"
    path.mkdir()
    assert problem(whole) == f"{name}: missing"
    path.rmdir()
    path.write_bytes(FILES[name])
    (path.parent / "stranger").write_text("")
    stranger = (path.parent / "stranger").relative_to(whole).as_posix()
    assert problem(whole) == f"{stranger}: not in the manifest"


def test_a_manifest_with_any_flipped_bit_is_not_believed(whole):
    content = (whole / "MANIFEST.json").read_bytes()
    for bit in random.Random(3).sample(range(8 * len(content)), 400):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (whole / "MANIFEST.json").write_bytes(damaged)
        assert problem(whole), bytes(damaged)


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "3", "{}", '{"files": null}', '{"files": 3}', '{"files": {"empty": 3}}', "\xff",
             '{"files": {"empty": []}}', '{"files": []}', '{"crc32c": "00000000"}',
             '{"crc32c": "', '{"crc32c": "zzzzzzzz", "files": {}}'],
)  # fmt: skip
def test_a_manifest_that_is_none_is_not_believed(whole, text):
    for name in set(FILES) - {"empty"}:
        (whole / name).unlink()
    (whole / "MANIFEST.json").write_bytes(text.encode("latin-1"))
    assert problem(whole).startswith("MANIFEST.json: unreadable (")


@pytest.mark.parametrize("number", [1, 3, 99])
def test_another_format_is_refused_and_not_called_damage(whole, monkeypatch, number):
    if number == 1:  # as it was before manifests had a checksum of their own
        (whole / "MANIFEST.json").write_text(json.dumps({"files": {"empty": [0, 0]}}))
    else:
        monkeypatch.setattr(manifest, "FORMAT", number)
        write(whole)
        monkeypatch.undo()
    with pytest.raises(
        MismatchError, match=rf"checkpoint .*/7 has format {number} and this version of jaxtrain reads 2"
    ):
        problem(whole)


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_shares_look_at_every_file_exactly_once(whole, count):
    for name in [name for name, content in FILES.items() if content]:
        (whole / name).write_bytes(FILES[name][:-1] + bytes([FILES[name][-1] ^ 1]))
        found = [problem(whole, share=(index, count)) for index in range(count)]
        assert [reason.split(":")[0] for reason in found if reason] == [name]
        (whole / name).write_bytes(FILES[name])


def test_without_reading_sizes_must_do(whole):
    content = FILES["state/d/0a"]
    (whole / "state/d/0a").write_bytes(bytes(len(content)))
    assert problem(whole, read=False) is None
    assert problem(whole).startswith("state/d/0a: checksum ")
    (whole / "state/d/0a").write_bytes(content[1:])
    assert problem(whole, read=False) == f"state/d/0a: {len(content) - 1} bytes, {len(content)} were written"


def test_without_a_manifest_nothing_is_believed(whole, tmp_path):
    (whole / "MANIFEST.json").unlink()
    assert problem(whole) == "MANIFEST.json: missing"
    assert problem(tmp_path / "nowhere") == "MANIFEST.json: missing"
