"""The page's own tests and types, where Node.js is."""

import os
import subprocess
import sys

import pytest

from page_bundle import installed_web


@pytest.mark.parametrize("script", ["test", "check"])
def test_the_pages_code(script: str) -> None:
    done = subprocess.run(
        ["npm", "run", "--silent", script], cwd=installed_web(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
