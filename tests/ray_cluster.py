"""A local Ray cluster with our application on it, in a process of its own: a test talks to it over HTTP.

    python tests/ray_cluster.py '{"model": ..., ...}' PORT FOLDER

It writes a line of JSON when the application answers, and one for each command that it reads: `replicas` tells their
names, `kill NAME` kills the process of one, `delete` has the application end, `data FILE` answers the rows of a file
with Ray Data, `lines FILE` its lines in OpenAI's batch format. At the end of its input the cluster's processes end.
"""

import json
import sys
import time
from typing import Any

import ray
import ray.data
from ray import serve

from llamarium.ray_data import AnswerLines, AnswerRows
from llamarium.server.ray_serve import build

NAME = "llamarium"


def main(args: dict[str, Any], port: int, folder: str) -> None:
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=2**27, _temp_dir=folder)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(args), name=NAME)
    tell("ready")
    try:
        for line in sys.stdin:
            command, _, word = line.strip().partition(" ")
            tell(COMMANDS[command](word))
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas(_: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in named if one["name"].startswith(f"SERVE_REPLICA::{NAME}#Replica#")]


def kill(name: str) -> float:
    ray.kill(ray.get_actor(name, namespace="serve"))
    return time.time()


def delete(_: str) -> str:
    serve.delete(NAME, _blocking=False)
    return "deleting"


def lines(path: str) -> list[str]:
    made = {"model": json.loads(sys.argv[1])["model"], "engine": {"kv_memory": 2**24}}
    how: dict[str, Any] = {"fn_constructor_kwargs": made, "batch_format": "pyarrow", "num_cpus": 1}
    rows = ray.data.read_text(path)
    answered = rows.map_batches(AnswerLines, batch_size=8, compute=ray.data.ActorPoolStrategy(size=1), **how)
    return [row["answer"] for row in answered.take_all()]


def data(path: str) -> list[dict[str, Any]]:
    made = {
        "model": json.loads(sys.argv[1])["model"],
        "temperature": 0.0,
        "max_tokens": 6,
        "engine": {"kv_memory": 2**24},
    }
    rows = ray.data.read_json(path, lines=True)
    how: dict[str, Any] = {"fn_constructor_kwargs": made, "batch_format": "pyarrow", "num_cpus": 1}
    return rows.map_batches(AnswerRows, batch_size=8, compute=ray.data.ActorPoolStrategy(size=1), **how).take_all()


COMMANDS = {"replicas": replicas, "kill": kill, "delete": delete, "data": data, "lines": lines}


def tell(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
