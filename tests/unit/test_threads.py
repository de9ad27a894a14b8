"""How many threads the kernels use, asked for at any moment."""

import subprocess
import sys

IMPORTING = """
import threading
from llamarium.kernels.threads import num_threads

def import_torch():
    import torch

thread = threading.Thread(target=import_torch)
thread.start()
while thread.is_alive():
    assert num_threads() >= 1
"""


def test_the_kernels_run_while_another_thread_imports_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORTING], check=True, timeout=300)
