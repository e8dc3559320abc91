"""A restore takes no more memory than a fresh start."""

import pathlib
import subprocess
import sys

import pytest

LIFE = pathlib.Path(__file__).with_name("memory.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, which only Linux has")
def test_the_peak_of_a_restore_is_at_most_that_of_a_fresh_start(tmp_path):
    peak_mib = {}
    for what in ("fresh", "restored"):
        command = [sys.executable, str(LIFE), what, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        peak_mib[what] = float(done.stdout)
    assert peak_mib["fresh"] > 3 * 96  # parameters and two moments: it was measured
    assert peak_mib["restored"] <= 1.05 * peak_mib["fresh"]
