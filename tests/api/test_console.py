"""The console: what each viewer sees, and the page in a real browser."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl_actors.api.console import Viewer, visible
from skyrl_actors.config.cluster import HttpConfig
from tests.api.local import config_for, edge
from tests.api.test_stored_keys import ROOT as ADMIN
from tests.api.test_stored_keys import keys_of, stored
from tests.conftest import ROOT, free_port

IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKm"
    "MIQAAAABJRU5ErkJggg=="
)
KEYS = {"api_keys": ["ann=tml-ann-0123456789abcdef", "bob=tml-bob-0123456789abcdef"]}
STATUS = {
    "name": "s",
    "models": [
        {"model_id": "s1kaaaaaaaaaa:train:0", "role": "policy"},
        {"model_id": "s2kbbbbbbbbbb:train:0", "role": "critic"},
    ],
    "queued": {"s1kaaaaaaaaaa:train:0": 2, "s2kbbbbbbbbbb:train:0": 3},
    "tenants": {"aaaaaaaaaa": {"trained_tokens": 5.0}, "bbbbbbbbbb": {}},
    "url": "secret",
    "fault": "s1kaaaaaaaaaa:train:0 is rebuilt",
    "engines": [
        {"name": "engine[0]", "state": "HEALTHY", "version": "s1kaaaaaaaaaa:train:0@3"},
        {"name": "engine[1]", "state": "s2kbbbbbbbbbb did not answer", "version": "base"},
    ],
    "base_models": {
        "a": {"place": "device", "fault": None},
        "b": {"place": "disk", "fault": "load failed: s2kbbbbbbbbbb …"},
    },
    "groups": {
        "policy": {"state": "up", "ranks": 1, "pids": [7]},
        "critic": {"state": "died of s2kbbbbbbbbbb; last lines: …", "ranks": 1, "pids": []},
    },
}


def test_warnings_are_for_admins_because_they_can_quote_logs():
    status = STATUS | {"warning": "the disk has 1.5 GiB left"}
    admin, ann = (visible(status, viewer) for viewer in (Viewer(True), Viewer(False, "a" * 10)))
    assert (admin["warning"], ann["warning"]) == ("the disk has 1.5 GiB left", None)


def test_each_viewer_sees_totals_and_its_own_objects():
    everything, nobody, ann = (
        visible(STATUS, viewer) for viewer in (Viewer(True), Viewer(False), Viewer(False, "a" * 10))
    )
    assert [m["queued"] for m in everything["models"]] == [2, 3] and set(everything["tenants"]) == {
        "a" * 10,
        "b" * 10,
    }
    assert nobody["models"] == [] and nobody["tenants"] == {} and nobody["key"] == "missing"
    assert [m["model_id"] for m in ann["models"]] == ["s1kaaaaaaaaaa:train:0"] and set(
        ann["tenants"]
    ) == {"a" * 10}
    assert "aaaaaaaaaa" not in json.dumps(nobody) and "bbbbbbbbbb" not in json.dumps(ann)
    assert [e.get("version") for e in ann["engines"]] == [
        "s1kaaaaaaaaaa:train:0@3",
        "base",
    ] and everything["engines"] == STATUS["engines"]
    assert everything["groups"] == STATUS["groups"]
    assert everything["base_models"] == STATUS["base_models"]
    assert [base["fault"] for base in ann["base_models"].values()] == [None, "cannot be loaded"]
    assert nobody["groups"] == {
        "policy": {"state": "up", "ranks": 1},
        "critic": {"state": "down", "ranks": 1},
    }
    for shown in (everything, nobody, ann):
        assert shown["queued"] == 5 and shown["num_models"] == 2 and "url" not in shown


def run_in(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "config.yaml").write_text("job: {}\n")
    rows = [
        {"step": step, "reward": step / 10, "eval/accuracy": 0.3 + step / 20} for step in range(8)
    ]
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / name / "summary.json").write_text(
        json.dumps({"metric": "eval/accuracy", "job": "ppo", "seed": 0, "seconds": 12.5})
    )
    samples = [
        {"step": step, "question": f"<i>ask {step}", "answer": "a", "expected": "b", "reward": 0.5}
        | {"images": [IMAGE, "https://elsewhere/a.png"]}
        for step in (0, 7, 7)
    ]
    (folder / name / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))


async def test_a_viewer_without_a_key_sees_no_names(tmp_path: Path):
    run_in(tmp_path / "runs", "one")
    http = HttpConfig.model_validate({**KEYS, "console": tmp_path / "runs"})
    async with edge(config_for(tmp_path, http=http)) as client:
        root = str(client.base_url).removesuffix("/api/v1/")
        await keys_of(client).add_key(stored(ADMIN, "ops", "admin"), "eve")
        for path in ("/", "/console/files/console.js", "/console/files/plotly.min.js"):
            answer = await client.get(f"{root}{path}")
            assert answer.status_code == 200, path
        assert (
            "frame-ancestors 'none'"
            in (await client.get(f"{root}/")).headers["content-security-policy"]
        )
        assert (await client.get(f"{root}/console/files/..%2froutes_console.py")).status_code == 404
        bare = (await client.get(f"{root}/console/state")).json()
        assert (
            bare["key"] == "missing"
            and bare["models"] == bare["checkpoints"] == []
            and bare["ready"]
        )
        assert (await client.get(f"{root}/console/runs")).json() == []
        for private in ("one", "one/samples"):
            answer = await client.get(f"{root}/console/runs/{private}")
            assert answer.status_code == 404, private
        assert (
            await client.get(f"{root}/console/state", headers={"X-API-Key": "tml-wrong"})
        ).status_code == 401
        ann = {"X-API-Key": "tml-ann-0123456789abcdef"}
        assert (await client.get(f"{root}/console/state", headers=ann)).json()["key"] == "given"
        for private in ("", "/one", "/one/samples"):  # jobs belong to no key
            answer = await client.get(f"{root}/console/runs{private}", headers=ann)
            assert answer.status_code == 404 or answer.json() == []
        admin = {"X-API-Key": ADMIN}
        runs = await client.get(f"{root}/console/runs", headers=admin)
        assert runs.json()[0]["after"] == "0.65"
        assert len((await client.get(f"{root}/console/runs/one", headers=admin)).json()) == 8
        last = (await client.get(f"{root}/console/runs/one/samples", headers=admin)).json()
        assert [row["step"] for row in last] == [7, 7]
        for odd in ("..%2f..", "two", "one%2f..%2fone", "two/samples", "..%2fruns%2fone/samples"):
            assert (
                await client.get(f"{root}/console/runs/{odd}", headers=admin)
            ).status_code == 404, odd


async def test_the_console_can_be_switched_off(tmp_path: Path):
    async with edge(config_for(tmp_path, http=HttpConfig(console=None))) as client:
        answer = await client.get(str(client.base_url).removesuffix("/api/v1/") + "/")
        assert answer.status_code == 404 and "is not served" in answer.json()["detail"]


@contextmanager
def served(folder: Path, http: dict[str, Any]) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        sys.executable,
        "-m",
        "tests.api.local",
        str(port),
        str(folder),
        str(folder),
        json.dumps(http),
    ]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            for _ in range(300):
                try:
                    httpx.get(f"{url}/healthz")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield url
        finally:
            process.terminate()


@pytest.fixture
def browser(tmp_path: Path):
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip(
            "chromium and chromedriver are not installed (Debian: chromium, chromium-driver)"
        )
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update"
    )
    for flag in (
        *flags.split(),
        "--disable-sync",
        "--window-size=1300,1500",
        f"--user-data-dir={tmp_path}/chromium",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


def test_the_page_works_in_a_browser(browser: Any, tmp_path: Path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def text(which: str) -> str:
        return browser.find_element(By.ID, which).text

    wait = WebDriverWait(browser, 30)
    run_in(tmp_path / "runs", "<b>bold")
    with served(tmp_path, {**KEYS, "console": str(tmp_path / "runs")}) as url:
        ann = httpx.Client(
            base_url=f"{url}/api/v1", headers={"X-API-Key": "tml-ann-0123456789abcdef"}, timeout=20
        )
        session = ann.post("/create_session", json={"tags": [], "sdk_version": "0.5.0"}).json()[
            "session_id"
        ]
        made = ann.post(
            "/create_model",
            json={
                "session_id": session,
                "model_seq_id": 0,
                "base_model": "Qwen/Qwen3-8B",
                "lora_config": {"rank": 4},
            },
        )
        assert (
            ann.post("/retrieve_future", json={"request_id": made.json()["request_id"]}).status_code
            == 200
        )
        browser.get(f"{url}/?theme=dark")
        wait.until(
            lambda driver: driver.execute_script("return document.documentElement.dataset.drawn")
        )
        assert (
            text("health") == "ready"
            and "an API key shows what is yours" in text("models")
            and session not in browser.page_source
        )
        assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
        dark = browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
        browser.find_element(By.ID, "theme").click()
        assert (
            browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
            != dark
        )
        browser.find_element(By.ID, "key").send_keys("tml-wrong\n")
        wait.until(lambda driver: "unknown API key" in text("notice"))
        browser.find_element(By.ID, "key").send_keys("tml-ann-0123456789abcdef\n")
        wait.until(lambda driver: f"{session}:train:0" in text("models"))
        assert (
            "LoRA, rank 4" in text("models")
            and not browser.find_element(By.ID, "notice").is_displayed()
        )
        assert (
            len(
                browser.find_elements(
                    By.CSS_SELECTOR, "#tokens .js-plotly-plot, #tokens.js-plotly-plot"
                )
            )
            == 1
        )
        assert "bold" not in browser.page_source  # jobs belong to no key
        browser.get("about:blank")
        faults = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
        assert faults and all("401" in e["message"] for e in faults)  # for the wrong key
    with served(tmp_path, {"console": str(tmp_path / "runs")}) as url:
        browser.get(url)
        wait.until(lambda driver: "<b>bold" in text("runs"))  # a name is shown, not obeyed
        browser.find_element(By.CSS_SELECTOR, "#runs tr.choice").click()
        wait.until(
            lambda driver: (
                len(driver.find_elements(By.CSS_SELECTOR, "#curves .js-plotly-plot")) == 2
            )
        )
        wait.until(lambda driver: "<i>ask 7" in text("samples"))
        assert "held-out prompts at step 7" in text("samples-part") and "ask 0" not in text(
            "samples"
        )
        images = browser.find_elements(By.CSS_SELECTOR, "#samples img")
        assert [image.get_attribute("src") for image in images] == [IMAGE, IMAGE]
        assert browser.execute_script("return arguments[0].naturalWidth", images[0]) == 1
        drawn = browser.execute_script(
            "return document.querySelector('#curves .js-plotly-plot').data[0].y"
        )
        assert drawn == pytest.approx([0.3 + step / 20 for step in range(8)])
        faults = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
        assert not faults
        fetched = browser.execute_script(
            "return performance.getEntriesByType('resource').map(e => e.name)"
        )
        assert fetched and all(
            name.startswith((url, "data:", "blob:")) for name in fetched
        )  # nothing from elsewhere


def test_an_operator_acts_in_the_page(browser: Any, tmp_path: Path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select, WebDriverWait

    def text(which: str) -> str:
        return browser.find_element(By.ID, which).text

    def confirmed(selector: str) -> str:
        browser.find_element(By.CSS_SELECTOR, selector).click()
        asked = browser.switch_to.alert
        question = asked.text
        asked.accept()
        return question

    wait = WebDriverWait(browser, 30)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "controller"
    log.write_text("the first line\n")
    with served(tmp_path, {"console": str(tmp_path)}) as url:
        anyone = httpx.Client(base_url=f"{url}/api/v1", timeout=20)
        opened = anyone.post("/create_session", json={"tags": [], "sdk_version": "0.5.0"})
        session = opened.json()["session_id"]
        browser.get(url)
        wait.until(lambda driver: session in text("sessions"))
        assert confirmed("[data-act=pause]") == "Pause the service?"
        wait.until(lambda driver: text("health") == "paused")
        confirmed("[data-act=resume]")
        wait.until(lambda driver: text("health") == "ready")
        assert session in confirmed("#sessions button")
        wait.until(lambda driver: "no sessions are open" in text("sessions"))
        assert anyone.post("/session_heartbeat", json={"session_id": session}).status_code == 410
        Select(browser.find_element(By.ID, "log")).select_by_value("controller")
        wait.until(lambda driver: "the first line" in text("log-text"))
        with log.open("a") as file:
            file.write("the next line\n")
        wait.until(lambda driver: "the next line" in text("log-text"))
