"""What is imported ahead leaves nothing running behind."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import multiprocessing, os, threading
import torch, graphcomp.compat.heavy
assert threading.active_count() == 1, threading.enumerate()
assert not multiprocessing.active_children()
tasks = "/proc/self/task"
print(len(os.listdir(tasks)) if os.path.exists(tasks) else 1)
"""


def test_nothing_runs_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
