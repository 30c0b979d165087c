"""Tests, tutorials and examples of other projects, from their source packages, run as they are."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from skyrl_actors.commands.cluster import prepare_base_model
from skyrl_actors.config.load import load
from tests.matrix import cookbook_suite, tuft_examples
from tests.service.own_service import own_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    work = tmp_path_factory.mktemp("suite")
    cookbook_suite.prepare(work, prepare_base_model(load("configs/cpu_tiny.yaml")))
    tuft_examples.prepare(work)
    (work / "service.yaml").write_text(cookbook_suite.service_config(work))
    with own_service(str(work / "service.yaml"), work / "state", "suite") as (_, url):
        yield work, url


def test_the_cookbooks_tests_pass(served: tuple[Path, str]):
    command = ["-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    code, output, _ = cookbook_suite.ran(*served, [*command, *cookbook_suite.TESTS], 300)
    assert code == 0 and " passed" in output and "skipped" not in output, output[-3000:]


@pytest.fixture(scope="module")
def tutorials(served: tuple[Path, str]) -> Iterator[dict[str, "Future[tuple[int, str, float]]"]]:
    """The tutorials, which run three at a time: they mostly import and wait."""
    pool = ThreadPoolExecutor(3)
    try:
        yield {
            name: pool.submit(cookbook_suite.ran, *served, [f"tutorials/{name}.py"], 240)
            for name in cookbook_suite.TUTORIALS
        }
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", cookbook_suite.TUTORIALS)
def test_the_cookbooks_tutorials_run_to_their_end(
    tutorials: dict[str, "Future[tuple[int, str, float]]"], name: str
):
    code, output, _ = tutorials[name].result()
    assert code == 0, output[-3000:]


@pytest.mark.parametrize("example", tuft_examples.EXAMPLES, ids=lambda example: example.name)
def test_the_examples_of_tuft_run_to_their_end(
    served: tuple[Path, str], example: tuft_examples.Example
):
    code, output, _ = cookbook_suite.ran(*served, example.command, 150)
    assert code == 0 and example.trained in output, output[-3000:]
    assert example.ends_with in output, output[-3000:]
    assert not [text for text in tuft_examples.HIDDEN if text in output], output
