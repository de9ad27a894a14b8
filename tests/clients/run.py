"""Run real programs against the server, and say which of them executed a call and used its result.

    python tests/clients/run.py [NAME ...]

Programs are looked for on the path and in `node_modules/.bin` below CLIENTS_DIR; what is not there is left out and
named. docs/reference/clients.md has the versions and results of the last run.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
CLIENTS_DIR = Path(os.environ.get("CLIENTS_DIR", HERE / "installed"))
TIMEOUT_S = 180
TASK = "Use a tool to find out what is printed, and repeat that."

sys.path.insert(0, str(HERE))

from scripted_server import PRINTED, scripted_server  # noqa: E402

from llamarium.hub.builtin import fetch  # noqa: E402


@dataclass(frozen=True)
class Program:
    """A program that is run.

    Attributes:
        command: Its words; `{url}` is the server's address, `{here}` this folder.
        environment: Variables; the same places in them.
        files: Files in its home, by name; the same places in them.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])


CODEX = """\
model = "small"
model_provider = "llamarium"
web_search = "disabled"

[model_providers.llamarium]
name = "Llamarium"
base_url = "{url}/v1"
wire_api = "responses"
"""
OPENCODE = """\
{{"model": "llamarium/small", "provider": {{"llamarium": {{"npm": "@ai-sdk/openai-compatible",
"options": {{"baseURL": "{url}/v1", "apiKey": "none"}}, "models": {{"small": {{}}}}}}}}}}
"""
OPENAI = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "small"}
CLAUDE = {
    "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "small",
    "ANTHROPIC_SMALL_FAST_MODEL": "small", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
}  # fmt: skip
PYTHON = ("{python}", "{here}/python_clients.py")
NODE = ("node", "{here}/ai_sdk.mjs")
PROGRAMS: Mapping[str, Program] = {
    "codex": Program(
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        {"CODEX_HOME": "{home}"}, {"config.toml": CODEX},
    ),
    "claude-code": Program(("claude", "-p", TASK, "--allowedTools", "Bash"), CLAUDE),
    "opencode": Program(
        ("opencode", "run", TASK), {"OPENCODE_CONFIG": "{home}/opencode.json"}, {"opencode.json": OPENCODE}
    ),
    "qwen-code": Program(("qwen", "--auth-type", "openai", "-y", "-p", TASK), OPENAI),
    "ai-sdk-openai": Program((*NODE, "openai"), OPENAI),
    "ai-sdk-openai-chat": Program((*NODE, "openai-chat"), OPENAI),
    "ai-sdk-compatible": Program((*NODE, "compatible"), OPENAI),
    "ai-sdk-anthropic": Program((*NODE, "anthropic"), OPENAI),
    "openai-agents": Program((*PYTHON, "openai_agents"), OPENAI),
    "openai-agents-chat": Program((*PYTHON, "openai_agents_chat"), OPENAI),
    "pydantic-ai": Program((*PYTHON, "pydantic_ai"), OPENAI),
    "pydantic-ai-anthropic": Program((*PYTHON, "pydantic_ai_anthropic"), OPENAI),
    "smolagents": Program((*PYTHON, "smolagents_tools"), OPENAI),
    "langchain": Program((*PYTHON, "langchain_openai"), OPENAI),
    "langgraph": Program((*PYTHON, "langgraph_agent"), OPENAI),
    "litellm": Program((*PYTHON, "litellm_completion"), OPENAI),
    "instructor": Program((*PYTHON, "instructor_object"), OPENAI),
}  # fmt: skip


def ran(name: str, url: str) -> subprocess.CompletedProcess[str] | None:
    """Run a program; None if it is not there."""
    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory() as home:
        places = {"url": url, "here": str(HERE), "home": home, "python": sys.executable}
        for file, text in program.files.items():
            (Path(home) / file).write_text(text.format(**places), encoding="utf-8")
        words = [word.format(**places) for word in program.command]
        path = f"{CLIENTS_DIR / 'node_modules/.bin'}:{os.environ['PATH']}"
        if (executable := shutil.which(words[0], path=path)) is None:
            return None
        given = {key: value.format(**places) for key, value in program.environment.items()}
        environment = {
            **os.environ,
            "HOME": home,
            "PATH": path,
            "NODE_PATH": str(CLIENTS_DIR / "node_modules"),
            **given,
        }
        return subprocess.run(
            [executable, *words[1:]], env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip


def main(names: list[str]) -> int:
    """Run some programs, or all; return 1 if one failed."""
    failed = False
    with scripted_server(fetch("smollm2-135m")) as (running, bodies):
        for name in names or PROGRAMS:
            bodies.clear()
            try:
                done = ran(name, running.url)
            except subprocess.TimeoutExpired as error:
                print(f"{name}: no end within {TIMEOUT_S} s: {str(error.stdout)[-500:]}")
                failed = True
                continue
            if done is None:
                print(f"{name}: not installed")
                continue
            statuses = [one["status"] for one in bodies]
            is_used = PRINTED in done.stdout and any(PRINTED in str(one["body"]) for one in bodies)
            named = sorted({part for one in bodies for part in one["no_effect"].split(",")} - {""})
            print(
                f"{name}: {'passes' if is_used else 'FAILS'}; statuses {statuses}; without effect: {', '.join(named)}"
            )
            if not is_used:
                failed = True
                print(done.stdout[-1500:], done.stderr[-1500:], sep="\n")
            if folder := os.environ.get("RECORD"):  # for a look at what the program sends
                Path(folder, f"{name}.json").write_text(json.dumps(bodies, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
