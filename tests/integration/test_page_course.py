"""The room Build: functions of the folder that was named are checked from the page, and no other code runs."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from llamarium.api import Llama
from llamarium.course import start
from llamarium.course.folder.source import solution
from llamarium.course.outline import file_of, step_named
from llamarium.page.extension import page as page_extension
from page_browser import KEY, check_fits_and_is_open, link, settled
from serving import Running, serving, small_llama

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600), pytest.mark.usefixtures("own_folders_list")]

ATTEND = step_named("attend")
WRONG = re.sub(r"np\.repeat\((\w+), N // K, axis=1\)", r"np.tile(\1, (1, N // K, 1))", solution(ATTEND))


@pytest.fixture(scope="module")
def llama(smollm2_path: object) -> Llama:
    return small_llama(smollm2_path)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory: pytest.TempPathFactory, own_folders_list: None) -> Path:
    folder = tmp_path_factory.mktemp("learner") / "my_llama"
    start(folder)
    (folder / file_of(ATTEND)).write_text(WRONG)
    return folder


def test_a_step_is_checked_its_place_is_opened_and_hints_come_one_by_one(
    page: Page, served: Running, build_folder: Path
) -> None:
    page.goto(link(served, stage="build", step="attend"))
    page.get_by_role("button", name="Check").click()
    result = page.locator(".result")
    expect(result).to_contain_text("repeated as a whole (0 1 0 1)", timeout=60_000)
    expect(result).to_contain_text("layer 0, head 1")
    settled(page)
    check_fits_and_is_open(page)
    for name in ("A hint", "A hint", "The solution"):
        page.get_by_role("button", name=name).click()
        settled(page)
    expect(page.locator(".hint")).to_have_count(2)
    expect(page.get_by_text("The solution")).to_be_visible()
    page.get_by_role("link", name="See the place").click()
    expect(page.get_by_role("heading", name="Attention", exact=True)).to_be_visible()
    assert "layer=0" in page.url and "head=1" in page.url and "ids=" in page.url

    (build_folder / file_of(ATTEND)).write_text(solution(ATTEND))
    page.goto(link(served, stage="build", step="attend"))
    page.get_by_role("button", name="Check").click()
    expect(page.locator(".result")).to_contain_text("Right.", timeout=60_000)
    expect(page.get_by_role("navigation", name="Steps")).to_contain_text("1 of 18 are right")


def test_code_runs_only_with_the_key_and_only_a_step_of_the_course(served: Running) -> None:
    asked = {"step": "attend"}
    with httpx.Client(base_url=served.url) as client:
        assert client.post("/inspect/build/checks", json=asked).status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"
        unknown = client.post("/inspect/build/checks", json={"step": "../../etc"})
        code = client.post("/inspect/build/checks", json=asked | {"code": "print(1)"})
        assert "def attend(" in steps_of(client)["attend"]["code"]
    assert (unknown.status_code, code.status_code) == (404, 400)
    assert "step ../../etc does not exist" in unknown.json()["error"]["message"]


def steps_of(client: httpx.Client) -> dict[str, Any]:
    return {step["name"]: step for step in client.get("/inspect/build").json()["steps"]}


def test_without_a_folder_or_a_key_nothing_runs(llama: Llama, tmp_path: Path) -> None:
    start(tmp_path / "my_llama")
    for extension, words in (
        (page_extension(), "llamarium inspect --build my_llama"),
        (page_extension(build_folder=tmp_path / "my_llama"), "has the server's key"),
    ):
        with serving(llama, extensions=[extension]) as running, httpx.Client(base_url=running.url) as client:
            for route in ("checks", "hints"):
                refused = client.post(f"/inspect/build/{route}", json={"step": "attend"})
                assert refused.status_code == 403
                assert words in refused.json()["error"]["message"]
            steps = client.get("/inspect/build").json()["steps"]
            assert [step["code"] for step in steps] == [None] * 18, "code is for the one that may run it"
