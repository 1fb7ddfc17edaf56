"""The reference as a tool: routes are tried out, and each one's programs are run as they stand there."""

import contextlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from support.servers.live_app import create_app, on_a_port
from support.servers.page import assert_accessible

from snapcap.service.api.app import Services
from snapcap.service.http.access import ApiKeys
from snapcap.service.http.bodies import BodyLimits

OpenPage = Callable[..., Page]
# [route, body, language, program] of every route, with each body that it takes, in each language.
PROGRAMS = """() => [...document.querySelectorAll(".operation")].flatMap((operation) => {
    const [form, select] = [operation.querySelector("form"), operation.querySelector("form select")];
    return [...select.options].flatMap((option) => {
        select.value = option.value;
        form.dispatchEvent(new Event("input"));
        return [...operation.querySelectorAll(".segment input")].map((radio) => {
            radio.click();
            const program = operation.querySelector(".program code").textContent;
            return [operation.id, option.textContent, radio.value, program];
        });
    });
})"""


def opened(page: Page, method: str, path: str) -> Locator:
    """A route of the reference, opened."""
    operation = page.locator(f"[id='{method}-{path}']")
    operation.locator("summary").first.click()
    return operation


def test_people_s_routes_come_first(address: str, open_page: OpenPage) -> None:
    page = open_page(address + "docs")
    expect(page.locator(".operation").first).to_be_visible()
    routes = page.locator(".operation > summary").all_inner_texts()
    shown = [" ".join(text.split()[:2]) for text in routes]
    assert shown[:3] == ["POST /v1/caption", "POST /v1/captions", "POST /v1/chat/completions"]
    assert shown.index("GET /livez") > shown.index("POST /v2/models/{model}/infer")


def test_every_program_does_what_it_says(
    address: str, open_page: OpenPage, image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(image(5))
    page = open_page(address + "docs")
    expect(page.locator(".operation").first).to_be_visible()
    page.evaluate("() => document.querySelectorAll('.operation').forEach((each) => (each.open = true))")
    expect(page.locator(".tryout")).to_have_count(page.locator(".operation").count())
    page.locator("input[type=file]").first.set_input_files(photo)
    programs: list[tuple[str, str, str, str]] = page.evaluate(PROGRAMS)
    assert {language for _, _, language, _ in programs} == {"curl", "python", "javascript"}
    assert {body for route, body, *_ in programs if route == "post-/v1/caption"} == {
        "the image itself",
        "multipart form",
        "JSON",
    }
    run = {"curl": run_curl, "python": run_python, "javascript": lambda text: run_javascript(page, text)}
    for route, body, language, program in programs:
        assert address.rstrip("/") in program
        said = run[language](program)
        captions = route.startswith("post-") and route != "post-/api/show"
        assert ("5 7" in said or "NSA3" in said) if captions else said.strip(), (route, body, language, said)


def run_curl(program: str) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", program.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, (program, done.stdout, done.stderr)
    return done.stdout


def run_python(program: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    return printed.getvalue()


def run_javascript(page: Page, program: str) -> str:
    said: str = page.evaluate(
        "async () => { const said = []; const console = { log: (value) => said.push(value) };"
        f"{program}\nreturn JSON.stringify(said); }}"
    )
    return said


def test_a_stream_s_programs_print_it_as_it_comes(
    address: str, open_page: OpenPage, image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photo = tmp_path / "it's $$ a photo.jpg"  # a name that shells and languages must quote
    photo.write_bytes(image(5))
    page = open_page(address + "docs")
    route = opened(page, "post", "/v1/chat/completions")
    route.locator("input[type=file]").set_input_files(photo)
    text = route.get_by_label("JSON")
    text.fill(text.input_value().replace("{", '{\n  "stream": true, "user": "`$HOME` \\\\",', 1))
    for language, run in (
        ("curl", run_curl),
        ("Python", run_python),
        ("JavaScript", lambda code: run_javascript(page, code)),
    ):
        route.get_by_role("radio", name=language).check(force=True)
        said = run(route.locator(".program code").inner_text())
        assert "[DONE]" in said
        assert "chat.completion.chunk" in said
    route.get_by_role("button", name="Send").click()
    expect(route.locator(".reply code")).to_contain_text("data: [DONE]")
    text.fill("{")
    expect(route.locator(".program code")).to_contain_text("The body is not JSON")
    expect(route.get_by_role("button", name="Send")).to_be_disabled()


def test_a_route_is_tried_out(engine, address: str, open_page: OpenPage, image) -> None:
    page = open_page(address + "docs", expected="status of 422")
    route = opened(page, "post", "/v1/caption")
    send, code = route.get_by_role("button", name="Send"), route.locator(".program code")
    send.click()  # without a file a sample is sent
    expect(route.locator(".tryout [role=status]")).to_contain_text("Status 200 after")
    expect(route.locator(".reply code")).to_contain_text('"model": "fake"')
    route.locator(".query > summary").click()
    route.get_by_label("max_new_tokens").fill("3 4&x=1")
    expect(code).to_contain_text("/v1/caption?max_new_tokens=3+4%26x%3D1")
    send.click()
    expect(route.locator(".tryout [role=status]")).to_contain_text("Status 422")
    expect(route.locator(".reply code")).to_contain_text("max_new_tokens")
    assert_accessible(page)
    route.get_by_label("max_new_tokens").fill("")
    engine.gate.clear()
    send.click()
    expect(route.locator(".tryout [role=status]")).to_have_text("Waiting…")
    route.get_by_role("button", name="Stop").click()
    expect(route.locator(".tryout [role=status]")).to_have_text("Stopped.")


def test_a_key_is_asked_for_and_stays_out_of_programs(services: Services, open_page: OpenPage, image) -> None:
    app: Any = create_app(services, BodyLimits(1 << 20, 5.0), keys=ApiKeys(["right"]))
    with on_a_port(app) as address:
        page = open_page(address + "/docs", expected="status of 401")
        route = opened(page, "post", "/v1/captions")
        expect(route.locator(".program code")).to_contain_text('-H "Authorization: Bearer $API_KEY"')
        route.get_by_role("button", name="Send").click()
        expect(route.locator(".tryout [role=status]")).to_contain_text("Status 401")
        page.get_by_label("API key").fill("right")
        page.get_by_label("API key").press("Enter")
        expect(page.get_by_label("API key")).to_be_hidden()
        route.get_by_role("button", name="Send").click()
        expect(route.locator(".tryout [role=status]")).to_contain_text("Status 200")
        assert "right" not in page.locator(".tryout").inner_text()
