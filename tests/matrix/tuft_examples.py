"""The examples of TuFT, unmodified, from its source package.

TuFT is another server with Tinker's protocol. Its examples are clients that use the official SDK.
They run beside the cookbook's suite, with the same small network as their base model.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.matrix.cookbook import write_rows
from tests.matrix.cookbook_suite import SMALL
from tests.matrix.source_packages import unpacked

VERSION = "0.2.2"
FOLDER = "tuft"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A script, its arguments beside those of all, and what it prints.

    `trained` is printed after a step, and `ends_with` after the last call.
    """

    name: str
    model: str = "--model"  # the name of the argument
    arguments: tuple[str, ...]
    trained: str
    ends_with: str

    @property
    def command(self) -> list[str]:
        """The arguments of Python; address and key are in the environment."""
        return [f"{FOLDER}/{self.name}/train.py", self.model, SMALL, *self.arguments]


# One example starts TuFT's own server in its process, and is not listed.
EXAMPLES = (
    Example(
        name="chat_sft",
        model="--base-model",
        arguments=("--num-steps=3", "--batch-size=4", "--eval-batch=4"),
        trained="done. loss: ",
        ends_with="checkpoint_saved=",
    ),
    Example(
        name="personality_sft",
        arguments=("--num-steps=3", "--batch-size=4", "--max-new-tokens=8"),
        trained="loss=",
        ends_with="✅ Done.",
    ),
    Example(
        name="countdown_rl",
        model="--base-model",
        arguments=(
            "--num-steps=2",
            "--batch-size=2",
            "--group-size=4",
            "--max-tokens=16",
            "--test-size=8",
            "--eval-every=1",
            "--eval-batch-size=2",
        ),
        # The small network writes no <answer>, so all rewards are equal and nothing is trained.
        trained="kept=0, skipP=2",
        ends_with="Checkpoint: tinker://",
    ),
    Example(
        name="on_policy_distillation",
        arguments=(
            "--num-steps=2",
            "--batch-size=2",
            "--group-size=2",
            "--max-new-tokens=16",
            "--num-eval=2",
            "--eval-every=1",
        ),
        trained="rollouts=4",
        ends_with="[save] run_id=",
    ),
)
# Examples go on after these errors of a server, so their exit status does not tell.
HIDDEN = ("[warn]", "[before] skipped", "failed, retrying")


def prepare(work: Path) -> None:
    """Add the examples, and the names of the hub that they use, to the suite's folder."""
    shutil.copytree(unpacked("tuft", VERSION) / "examples", work / FOLDER)
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i % 5} + {4 - i % 5}?"},
                {"role": "assistant", "content": "It is 4."},
            ]
        }
        for i in range(64)
    ]
    for split in ("train", "test"):
        write_rows(work / "HuggingFaceH4/no_robots" / f"{split}.jsonl", chats)
    games = [{"target": 13 + i % 7, "nums": [2, 3, 7 + i % 7]} for i in range(64)]
    write_rows(work / "Jiayi-Pan/Countdown-Tasks-3to4/train.jsonl", games)
