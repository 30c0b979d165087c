"""The cookbook's own tests and tutorials, from its source package, run as they are."""

from collections.abc import Iterator
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from skyrl_actors.commands.cluster import prepare_base_model
from skyrl_actors.config.load import load
from tests.matrix import cookbook_suite
from tests.service.own_service import own_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    work = tmp_path_factory.mktemp("suite")
    cookbook_suite.prepare(work, prepare_base_model(load("configs/cpu_tiny.yaml")))
    (work / "service.yaml").write_text(cookbook_suite.service_config(work))
    with own_service(str(work / "service.yaml"), work / "state", "suite") as (_, url):
        yield work, url


def test_its_tests_pass(served: tuple[Path, str]):
    command = ["-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    code, output, _ = cookbook_suite.ran(*served, [*command, *cookbook_suite.TESTS], 300)
    assert code == 0 and " passed" in output and "skipped" not in output, output[-3000:]


def test_its_tutorials_run_to_their_end(served: tuple[Path, str]):
    failed: list[str] = []
    for name in cookbook_suite.TUTORIALS:
        try:
            code, output, seconds = cookbook_suite.ran(*served, [f"tutorials/{name}.py"], 150)
        except TimeoutExpired as error:
            failed.append(str(error))
            continue
        print(f"{name}: {seconds:.0f} s")
        if code:
            failed.append(f"{name} ended with {code}:\n{output[-1000:]}")
    assert not failed, "\n\n".join(failed)
