"""The page's schema is one: pydantic's and TypeScript's; and the page costs a server no torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llamarium.page as module
from llamarium.page.probes.model import SOURCES, source_of
from llamarium.page.schema.everything import as_json

WEB = Path(__file__).parents[2] / "web"


def test_the_page_imports_only_types_that_the_schema_defines() -> None:
    """Only types are imported from the generated file: the bundle is built without it."""
    defined = set(json.loads(as_json())["$defs"])
    imports = r'import (type )?\{([^}]*)\} from "(?:\.\./|\./)+schema"'
    found = [one for path in sorted((WEB / "src").rglob("*.*")) if path.suffix in (".ts", ".svelte")
             for one in re.findall(imports, path.read_text(encoding="utf-8"))]  # fmt: skip
    named = {name.split()[0] for _, names in found for name in names.split(",") if name.strip()}
    assert all(is_type for is_type, _ in found)
    assert len(named) > 30 and named <= defined


def test_only_routes_speak_http() -> None:
    """The rest of the page raises the library's errors, which `server/errors.py` turns into statuses."""
    page = Path(module.__file__).parent
    named = {path.relative_to(page).as_posix() for path in page.rglob("*.py") if "ApiError" in path.read_text("utf-8")}
    assert {path for path in named if "routes" not in path} == {"assets.py", "work.py"}


@pytest.mark.torch
def test_every_name_of_lines_has_lines() -> None:
    for name in SOURCES:
        found = source_of(name)
        assert found.text.startswith(("def ", "class ", "@"))
        assert found.file.startswith("llamarium/") and found.line > 1


def test_serving_the_page_imports_no_torch() -> None:
    program = "import sys, llamarium.page.extension; llamarium.page.extension.page(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_shapes_scaling_has_the_parameters_of_its_type() -> None:
    from llamarium.page.architecture import view_of_shape

    view = view_of_shape("llama-3.2-1b")
    assert view.rope_scaling is not None and None not in view.rope_scaling.values()
    assert view.rope_scaling["rope_type"] == "llama3" and view.rope_scaling["factor"] == 32


def test_biases_are_counted_with_their_matrix() -> None:
    from dataclasses import replace

    from llamarium.cost import count_parameters
    from llamarium.page.architecture import module_tree
    from llamarium.presets import preset

    config = replace(preset("tiny"), attention_bias=True, mlp_bias=True)
    assert module_tree(config, {}).parameters == count_parameters(config).total
    assert count_parameters(config).total > count_parameters(preset("tiny")).total
