"""docs/*.md: the code of every page runs as it stands, in order; every page is linked from the README."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(
    set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / name for name in ("architecture.md", "benchmarks.md")}
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page):
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
    assert "assert " in code
    env = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_readme_leads_to_every_page():
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme, page.name
