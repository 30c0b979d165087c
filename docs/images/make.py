"""Make the screenshots of the docs: `python docs/images/make.py`.

A real SDK client trains on a real service, which this script starts and stops on this machine. It
takes about four minutes on two cores. On Debian it needs the packages chromium and chromium-driver.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PORT = 8123
NAME = "pictures"
BY_CLI = [sys.executable, "-m", "skyrl_actors"]


def browser(folder: str, width: int, height: int) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update"
    )
    for flag in (
        *flags.split(),
        "--disable-sync",
        f"--window-size={width},{height}",
        f"--user-data-dir={folder}/chromium",
    ):
        options.add_argument(flag)
    return webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))


def console(driver: webdriver.Chrome, run: str) -> None:
    for theme in ("light", "dark"):
        driver.get(f"http://127.0.0.1:{PORT}/?theme={theme}&run={run}")
        WebDriverWait(driver, 30).until(
            lambda d: d.execute_script(
                "return document.querySelectorAll('#curves .js-plotly-plot').length > 3"
            )
        )
        time.sleep(25)  # so that the curves have some history
        driver.execute_script(
            "const curves = document.querySelector('#curves');"
            "curves.replaceChildren(...[...curves.querySelectorAll(':scope > div')].slice(0, 6))"
        )
        height = driver.execute_script("return document.body.scrollHeight")
        driver.set_window_size(1300, height + 140)
        time.sleep(0.5)
        driver.save_screenshot(str(HERE / f"console_{theme}.png"))


def ray_dashboard(driver: webdriver.Chrome, token: str) -> None:
    driver.set_window_size(1500, 1000)
    driver.get("http://127.0.0.1:8265/#/actors")
    field = WebDriverWait(driver, 30).until(
        lambda d: d.find_element(By.CSS_SELECTOR, "[role=dialog] input")
    )
    field.send_keys(token)
    driver.find_element(By.XPATH, "//button[text()='Submit' or text()='SUBMIT']").click()
    time.sleep(10)
    driver.save_screenshot(str(HERE / "ray_dashboard.png"))


def main(runs: str) -> None:
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        options = [
            f"name={NAME}",
            f"http.port={PORT}",
            f"http.console={runs}",
            f"journal.folder={folder}/journal",
            f"checkpoint_dir={folder}/checkpoints",
        ]
        subprocess.run([*BY_CLI, "serve", "configs/cpu_tiny.yaml", *options], cwd=ROOT, check=True)
        environment = {
            **os.environ,
            "TINKER_BASE_URL": f"http://127.0.0.1:{PORT}",
            "TINKER_API_KEY": "tml-local",
        }
        trains = subprocess.Popen(
            [sys.executable, "-m", "examples.ppo_critic"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        driver = browser(folder, 1300, 1200)
        try:
            time.sleep(20)
            console(driver, sorted(path.name for path in Path(runs).iterdir())[-1])
            ray_dashboard(driver, (Path.home() / ".ray" / "auth_token").read_text().strip())
        finally:
            driver.quit()
            trains.kill()
            subprocess.run([*BY_CLI, "stop", "--name", NAME], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
