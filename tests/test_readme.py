"""What the README shows works as it stands there."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_import_example_runs_and_learns():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    step, loss = done.stdout.split()
    assert step == "100"  # 400 micro-batches, k = 4
    assert float(loss) < 0.1  # the first loss is 8: the variance of a sum of 8 normals


def test_the_two_commands_stand_first_and_ci_runs_the_second():
    commands = re.findall(r"^python3 -m venv .*$", README, re.M)
    assert len(commands) == 2
    assert README.index(commands[0]) < README.index(commands[1]) < README.index("\n## ")
    shown = subprocess.run(
        ["bash", "-c", "sed -n '/<!-- test-command -->/,/```$/p' README.md | grep '^python3 '"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    ).stdout.strip()  # fmt: skip
    assert shown == commands[1]
    assert "<!-- test-command -->" in (ROOT / ".ci" / "run").read_text()


def test_every_file_and_page_it_names_is_there():
    for name in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / name).exists(), name
    for names in re.findall(r"^\| (`.*?) \|", README, re.M):
        folder = ""
        for name in re.findall(r"`([\w./]+)`", names):
            folder = "jaxtrain/" if name.startswith("jaxtrain/") else folder
            path = name if name.startswith("jaxtrain/") or not folder else folder + name
            assert (ROOT / path).exists(), path
