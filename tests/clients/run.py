"""Run real programs against the server, and say which of them executed a call and used its result.

    python tests/clients/run.py [--install] [NAME ...]

`programs.toml` lists the programs. Each is installed in a folder of its own below CLIENTS_DIR, by `--install` or by
hand; what is not there is named. Where the folder RECORD is given, each program's requests are written into it.
docs/reference/clients.md has the versions and results of the last run.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CLIENTS_DIR = Path(os.environ.get("CLIENTS_DIR", HERE / "installed")).absolute()
TIMEOUT_S = 180
INSTALL_TIMEOUT_S = 1200
TASK = "Use a tool to find out what is printed, and repeat that."
OPENAI = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "small"}


@dataclass(frozen=True)
class Package:
    """A table of `programs.toml`: what is installed together, and the programs that it has.

    Attributes:
        name: The table's, and its folder's.
        run: The words of a command, by the program's name.
        environment: Variables beside OPENAI's.
        files: Files in a program's home, by name.
        npm: What npm installs.
        pip: What pip installs, into an environment of its own.
    """

    name: str
    run: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    npm: Sequence[str] = ()
    pip: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        return CLIENTS_DIR / self.name

    @property
    def path(self) -> str:
        """Where commands are looked for."""
        return f"{self.folder / 'bin'}:{self.folder / 'node_modules/.bin'}:{os.environ['PATH']}"

    @property
    def is_installed(self) -> bool:
        return any((self.folder / name).is_dir() for name in ("bin", "node_modules"))

    def install(self) -> None:
        """Install these versions, unless they are there; CalledProcessError or TimeoutExpired says what failed."""
        stamp, pins = self.folder / "installed.txt", "\n".join([*self.npm, *self.pip])
        if stamp.exists() and stamp.read_text(encoding="utf-8") == pins:
            return
        print(f"Installing {self.name} ...", flush=True)
        if self.pip:
            _must([sys.executable, "-m", "venv", str(self.folder)])
            pip = [str(self.folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _must([*pip, *self.pip])
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            _must(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(self.folder), *self.npm])
        stamp.write_text(pins, encoding="utf-8")

    def start(self, program: str, url: str) -> subprocess.CompletedProcess[str]:
        """Run a program in a new home; TimeoutExpired if it does not end."""
        with tempfile.TemporaryDirectory() as home:
            places = {"url": url, "here": str(HERE), "home": home}
            for file, text in self.files.items():
                (Path(home) / file).write_text(put(text, places), encoding="utf-8")
            words = [put(word, places | {"task": TASK}) for word in shlex.split(self.run[program])]
            executable = shutil.which(words[0], path=self.path)
            if executable is None:
                raise FileNotFoundError(f"{words[0]} is not in {self.folder}")
            variables = {key: put(value, places) for key, value in {**OPENAI, **self.environment}.items()}
            node = {"NODE_PATH": str(self.folder / "node_modules")}
            return subprocess.run(
                [executable, *words[1:]],
                env={**os.environ, "HOME": home, "PATH": self.path, **node, **variables},
                cwd=home,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )


def _must(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, stdin=subprocess.DEVNULL)


def put(text: str, places: Mapping[str, str]) -> str:
    """Put values in a text for `{name}`; other braces stay."""
    for name, value in places.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def read_packages() -> dict[str, Package]:
    """The table of each program, in its order."""
    tables = tomllib.loads((HERE / "programs.toml").read_text(encoding="utf-8"))
    packages = [Package(name, **table) for name, table in tables.items()]
    return {program: package for package in packages for program in package.run}


def check(package: Package, program: str, url: str, requests: list[dict[str, Any]]) -> bool:
    """Run a program and say how that went; whether it passed.

    Args:
        requests: Those that the server received, with their statuses; emptied before.
    """
    from scripted_server import PRINTED

    requests.clear()
    try:
        ended = package.start(program, url)
        stdout, stderr = ended.stdout, ended.stderr
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        stdout, stderr = "", str(error)
    is_used = PRINTED in stdout and any(PRINTED in str(request["body"]) for request in requests)
    no_effect = sorted({name for request in requests for name in request["no_effect"].split(",")} - {""})
    statuses = [request["status"] for request in requests]
    verdict = "passes" if is_used else "FAILS"
    print(f"{program}: {verdict}; statuses {statuses}; without effect: {', '.join(no_effect)}", flush=True)
    if not is_used:
        print(stdout[-1500:], stderr[-1500:], sep="\n")
    if folder := os.environ.get("RECORD"):  # for a look at what the program sends
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{program}.json").write_text(json.dumps(requests, indent=1), encoding="utf-8")
    return is_used


def main() -> int:
    """Run some programs, or all; return 1 if one failed, or could not be installed."""
    packages = read_packages()
    parser = argparse.ArgumentParser(description="Run real programs against the server.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all)")
    parser.add_argument("--install", action="store_true", help="install into CLIENTS_DIR what is not there")
    options = parser.parse_args()
    if unknown := set(options.names) - packages.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected names of {', '.join(packages)}")

    chosen = {name: packages[name] for name in options.names or packages}
    failed: list[str] = []
    if options.install:
        failed += [name for name, package in chosen.items() if not install(package)]

    from scripted_server import scripted_server

    from llamarium.hub.builtin import fetch

    with scripted_server(fetch("smollm2-135m")) as (running, requests):
        for name, package in chosen.items():
            if not package.is_installed:
                print(f"{name}: not installed")
            elif not check(package, name, running.url, requests):
                failed.append(name)
    print(f"{len(failed)} of {len(chosen)} programs failed")
    return int(bool(failed))


def install(package: Package) -> bool:
    """Install a package; if that fails, say so and return False."""
    try:
        package.install()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{package.name}: cannot be installed: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
