"""The conformance kit is green on a right server, and each of its checks can turn red."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import uvicorn
from tinker.types import RequestErrorCategory
from tinker_conformance.__main__ import chosen, main
from tinker_conformance.checks import CHECKS
from tinker_conformance.reproducer import script_of
from tinker_conformance.scorecard import outcome
from tinker_conformance.server import REFUSALS, Server

from skyrl_actors.api.app import build_app
from skyrl_actors.api.state import ApiState
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from tests.api.local import MODEL, LocalClient, config_for
from tests.conformance import bigram
from tests.conformance.bigram import SECOND_KEY, BigramBackend, Faulty

FAULTS: dict[str, tuple[str, ...]] = {
    "hides models": ("capabilities",),
    "tells another rank": ("info",),
    "returns losses": ("forward_shapes",),
    "drops learning_rate": ("learning_rate_and_eps",),
    "reverses rows": ("order_of_rows", "rows_are_apart"),
    "hides checkpoints": ("checkpoint_is_listed",),
    "forgets the rank of runs": ("training_run",),
    "drops max_tokens": ("sampler_draws", "counts"),
    "forgets losses": ("training_call",),
    "averages": ("cross_entropy_is_a_sum", "gradient_is_a_sum", "calls_add_up"),
    "drops sampling logprobs": ("importance_sampling", "ppo", "cispo", "dro", "on_policy_ratio"),
    "last call wins": ("calls_add_up",),
    "forward clears": ("forward_keeps_gradients",),
    "forward adds": ("forward_keeps_gradients",),
    "keeps gradients": ("step_clears_gradients",),
    "drops weights": ("weights_scale", "cross_entropy_is_a_sum"),
    "turns policy gradients": ("gradients_are_symmetric",),
    "halves epsilon": ("learning_rate_and_eps",),
    "drops beta1": ("beta1",),
    "drops beta2": ("beta2",),
    "drops weight_decay": ("weight_decay",),
    "drops grad_clip_norm": ("clipping",),
    "drops seeds": ("seed_decides",),
    "draws seeds": ("seed_decides",),
    "shares weights": ("models_are_apart", "many_models"),
    "loads nothing": ("state_is_restored",),
    "loads no moments": ("optimizer_is_restored",),
    "keeps moments": ("optimizer_is_restored",),
    "samples live weights": ("samplers_are_pinned",),
    "scores otherwise": ("prompt_logprobs_agree",),
    "shows other logprobs": ("sample_logprobs_agree",),
    "drops sampling seeds": ("seeds",),
    "draws sampling seeds": ("seeds",),
    "draws once": ("counts",),
    "drops stops": ("stops",),
    "drops top_k": ("greedy_ways",),
    "drops temperature": ("frequencies", "greedy_ways"),
    "draws evenly": ("frequencies",),
    "opens new weights": ("samplers_of_paths",),
    "trains the base": ("base_is_untouched",),
    "does repeats": ("repeated_requests",),
    "forgets results": ("results_are_kept",),
    "loses gradients": ("killed_with_a_gradient",),
    "computes again": ("killed_during_a_call",),
    "loses samplers": ("killed_with_a_sampler",),
    "serves aliases": ("each_model_is_served", "models_differ"),
    "trains small ranks": ("ranks",),
    "is blind": ("images_are_seen",),
    "moves images": ("image_positions",),
    "trains blind": ("images_train",),
    "polls": ("added_latency",),
    "waits in one queue": ("small_calls_pass",),
    "serves in order": ("fair_between_keys",),
    "accepts infinity": ("infinite_losses",),
    "breaks in losses": ("ppo", "importance_sampling", "cispo", "dro", "infinite_losses"),
    "accepts all": (
        "short_targets",
        "weights_that_are_not_numbers",
        "unknown_tokens",
        "unknown_losses",
        "bad_steps",
        "bad_samples",
        "names_that_are_paths",
        "unknown_things",
        "others_go_on",
        "context_length",
        "broken_images",
    ),
}


class Running:
    """The server of bigrams in a thread, and the kit's connection to it."""

    def __init__(self, folder: Path, base: Path):
        self.killed = folder / "killed"
        self.backend = BigramBackend(str(base), self.killed)
        config = config_for(folder)
        listener = socket.create_server(("127.0.0.1", 0))  # connections wait until it is served
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started = threading.Event()

        async def serve() -> None:
            controller = Controller(config, self.backend, SqlJournal(config.journal, KINDS))
            await controller.start()
            app: Any = Faulty(
                build_app(ApiState(config, LocalClient(controller))), lambda: self.backend.faults
            )
            self.server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
            started.set()
            try:
                await self.server.serve(sockets=[listener])
            finally:
                await controller.close()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        assert started.wait(30)

    def client(self, tolerance: float = 0.02, start_command: str | None = None) -> Server:
        kill = f"touch {self.killed}"
        return Server(
            self.url,
            "tml-kit",
            MODEL,
            tolerance,
            10.0,
            kill,
            start_command,
            second_api_key=SECOND_KEY,
            latency_s=0.25,
        )

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, random_base: Path) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("kit"), random_base)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def server(running: Running) -> Iterator[Server]:
    made = running.client()
    yield made
    running.backend.faults = set()
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_right_server_passes(running: Running, server: Server, check: Any):
    running.backend.faults = set()
    row = outcome(check, server, 60)
    wanted = "skip" if check.name == "models_differ" else "pass"  # this server has one model
    assert row.result == wanted, row


class Reproducers:
    """Runs scripts against the server.

    `printed` has what the last one printed, `broke` the error that was no refusal.
    """

    def __init__(self, running: Running, capsys: pytest.CaptureFixture[str]):
        self._running, self._capsys = running, capsys
        self.printed, self.broke = "", ""

    def refuses(self, script: str) -> bool:
        """Run a script, and return whether the server refused its last call."""
        names: dict[str, Any] = {}
        self.broke = ""
        try:
            exec(compile(script, "reproducer", "exec"), names)
            return False
        except Exception as error:  # noqa: BLE001  whatever the script shows
            in_server = getattr(error, "category", None) == RequestErrorCategory.Server
            if isinstance(error, REFUSALS) and not in_server:
                return True
            self.broke = repr(error)
            return False
        finally:
            for each in [one for one in names.values() if isinstance(one, tinker.ServiceClient)]:
                each.__exit__(None, None, None)
            self.printed = self._capsys.readouterr().out

    def unequal(self) -> list[str]:
        """Return printed lines of numbers that should be equal, and are not."""
        found: list[str] = []
        for line in self.printed.splitlines():
            first, equals, second = line.partition(" equals ")
            if not equals or first[0] in "[<{":
                continue
            if float(first) != pytest.approx(float(second), rel=0.02, abs=1e-6):
                found.append(line)
        return found


@pytest.fixture
def reproducers(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Reproducers:
    monkeypatch.setenv("TINKER_API_KEY", "tml-kit")
    monkeypatch.setenv("SECOND_TINKER_API_KEY", SECOND_KEY)
    monkeypatch.setattr("builtins.input", lambda _: running.killed.touch())
    return Reproducers(running, capsys)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_reproducer_runs_as_it_is(
    running: Running, server: Server, check: Any, reproducers: Reproducers
):
    """On a right server. What it prints as equal is equal, and what is to be refused is refused."""
    running.backend.faults = set()
    assert server.alpha > 0
    script = script_of(check, server)
    refused = "# is refused" in script
    assert reproducers.refuses(script) == refused and not reproducers.broke
    assert reproducers.printed or refused
    assert not reproducers.unequal() and "was accepted" not in reproducers.printed


# Their reproducers print what a reader compares: seconds, lines of tokens, lists of models.
READ = {"seeds", "greedy_ways", "frequencies", "stops", "seed_decides", "many_models"}
READ |= {"base_is_untouched", "samplers_are_pinned", "sample_logprobs_agree", "others_go_on"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reproducer_shows_the_fault(
    running: Running, server: Server, fault: str, reproducers: Reproducers
):
    running.backend.faults = set()
    assert server.alpha > 0
    for check in chosen(None, list(FAULTS[fault])):
        script = script_of(check, server)
        running.backend.faults = {fault}
        try:
            was_refused = reproducers.refuses(script)
        finally:
            running.backend.faults = set()
            running.killed.unlink(missing_ok=True)
        if reproducers.broke:
            continue
        if "# is refused" in script:
            assert not was_refused, check.name
        elif " equals " in script and check.name not in READ:
            moves_nothing = "a step moves by 0.0\n" in reproducers.printed
            assert reproducers.unequal() or moves_nothing, (check.name, reproducers.printed)
        elif "was accepted" in script:
            # What this server answers in place of a refusal is no result that the SDK knows.
            assert re.search("was accepted|ValueError|ValidationError", reproducers.printed), (
                check.name
            )


def test_each_check_can_turn_red():
    assert {name for names in FAULTS.values() for name in names} == {c.name for c in CHECKS}


def test_a_server_that_drops_seeds_fails_one_check_and_not_all(running: Running):
    running.backend.faults = {"draws seeds"}
    server = running.client()
    try:
        names = ["seed_decides", "gradient_is_a_sum", "calls_add_up", "learning_rate_and_eps"]
        rows = {each.name: outcome(each, server, 60) for each in chosen(None, names)}
        assert server.drops_seeds
        assert [name for name, row in rows.items() if row.result != "pass"] == ["seed_decides"]
    finally:
        running.backend.faults = set()
        server.close()


def test_the_scorecard_is_written(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = {kind: tmp_path / f"card.{kind}" for kind in ("json", "html")}
    given = ["--base-url", running.url, "--model", MODEL, "--check", "info", "--check", "beta1"]
    running.backend.faults = {"tells another rank"}
    written = [f"--{kind}={file}" for kind, file in files.items()]
    assert main([*given, *written]) == 1
    running.backend.faults = set()
    found = json.loads(files["json"].read_text())
    assert [(row["check"], row["result"]) for row in found["rows"]] == [
        ("info", "FAIL"),
        ("beta1", "pass"),
    ]
    assert "lora_rank is 99" in files["html"].read_text()
    shown = capsys.readouterr().out
    assert "numbers          1     0     0" in shown and "create_lora_training_client" in shown
    assert main(given) == 0
    assert main(["--base-url", running.url, "--check", "nothing"]) == 2
    assert main([*given, "--tier", "core", "--check", "ppo"]) == 0, "one of them is there"
    assert main(["--base-url", running.url, "--tier", "core", "--check", "ppo"]) == 2
    assert main([*given, "--html", str(tmp_path / "none" / "card.html")]) == 2
    assert main(["--base-url", "http://127.0.0.1:9", "--model", "m", "--check", "info"]) == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_its_checks_red(running: Running, server: Server, fault: str):
    running.backend.faults = {fault}
    try:
        for check in chosen(None, list(FAULTS[fault])):
            row = outcome(check, server, 60)
            assert row.result in ("FAIL", "ERROR"), row
            assert row.detail and "tinker.ServiceClient" in row.reproducer
    finally:
        running.backend.faults = set()
        running.killed.unlink(missing_ok=True)


@pytest.mark.parametrize("fault", ["", "draws seeds"])
def test_a_run_leaves_nothing_on_the_server(running: Running, fault: str):
    running.backend.faults = {fault}
    server = running.client()
    before = saved(running)
    names = ["state_is_restored", "optimizer_is_restored", "samplers_of_paths", "clipping"]
    try:
        rows = [outcome(each, server, 60) for each in chosen(None, names)]
        assert [row.result for row in rows] == ["pass"] * len(names), rows
        server.close()
        assert saved(running) == before
    finally:
        running.backend.faults = set()


def saved(running: Running) -> set[str]:
    """Return the paths of all checkpoints."""
    server = running.client()
    listed = server.service.create_rest_client().list_user_checkpoints(limit=1000)
    paths = {one.tinker_path for one in server.got(listed).checkpoints}
    server.close()
    return paths


def test_a_server_that_cannot_be_started_again_ends_no_run(running: Running):
    running.backend.faults = set()
    server = running.client(start_command="false")
    assert not server.start()
    server.close()


def test_a_server_without_end_is_given_up(running: Running):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        given = ["--base-url", url, "--model", MODEL, "--check", "info", "--limit", "1"]
        assert main(given) == 2


@pytest.mark.parametrize("logits", [0.5, 2.0])
def test_the_numbers_tier_is_green_in_bfloat16(
    running: Running, monkeypatch: pytest.MonkeyPatch, logits: float
):
    """Logits are rounded, as those of a head in bfloat16 are."""
    running.backend.faults = set()
    monkeypatch.setattr(bigram, "BASE", logits * bigram.BASE)
    monkeypatch.setattr(bigram, "ROUNDS", True)
    server = running.client(tolerance=0.1)
    try:
        found = {each.name: outcome(each, server, 60) for each in chosen(["numbers"], None)}
        assert not [row for row in found.values() if row.result != "pass"]
    finally:
        server.close()
