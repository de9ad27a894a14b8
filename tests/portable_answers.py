"""A local server's answers to the page's questions. A program: kernels are chosen once in a process.

    LLAMARIUM_KERNELS=portable python tests/portable_answers.py MODEL QUESTIONS.json

A question is [method, path, body]; `{id}` in a path is that of the last pass. Numbers in bulk are written as
{"axes", "shape", "values"}, and events as a list.
"""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import llamarium
from llamarium.page.extension import page
from serving import serving


def answers_of(model: str, questions: list[tuple[str, str, Any]]) -> list[Any]:
    """Ask a server of this process."""
    found = list[Any]()
    pass_id = ""
    with serving(llamarium.load(model), extensions=[page()]) as served, httpx.Client(timeout=None) as client:
        for method, path, body in questions:
            answer = client.request(method, served.url + path.replace("{id}", pass_id), json=body)
            answer.raise_for_status()
            if "x-shape" in answer.headers:
                values = np.frombuffer(answer.content, "<f4").tolist()
                shape = [int(size) for size in answer.headers["x-shape"].split(",")]
                found.append({"axes": answer.headers["x-axes"], "shape": shape, "values": values})
            elif answer.headers["content-type"].startswith("text/event-stream"):
                lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
                found.append([json.loads(line) for line in lines])
            else:
                found.append(answer.json())
                pass_id = found[-1]["id"] if path == "/inspect/passes" else pass_id
    return found


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[2]).read_text())
    json.dump(answers_of(sys.argv[1], asked), sys.stdout)
