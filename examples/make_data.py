"""Make small datasets for the jobs in configs/jobs: words to write backwards, and drawings to name.

python -m examples.make_data data
"""

import json
import random
import sys
from pathlib import Path

from skyrl_actors.jobs.shapes import shape_tasks

LETTERS = "abcdefghijkl"


def word(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 5)))


def wrong(rng: random.Random, text: str) -> str:
    """Return a wrong answer: the word itself, or its reverse with one letter changed."""
    place = rng.randrange(len(text))
    changed = (
        text[::-1][:place]
        + rng.choice([c for c in LETTERS if c != text[::-1][place]])
        + text[::-1][place + 1 :]
    )
    return rng.choice([text, changed]) if text != text[::-1] else changed


def write_shapes(folder: Path, count: int) -> None:
    """Write shapes.jsonl, and its images into a folder beside it."""
    (folder / "shapes").mkdir(exist_ok=True)
    with (folder / "shapes.jsonl").open("w") as file:
        for i, task in enumerate(shape_tasks(count, seed=7)):
            image = f"shapes/{i:04}.png"
            (folder / image).write_bytes(task.image)
            row = {"prompt": task.question, "completion": task.answer, "images": [image]}
            file.write(json.dumps(row) + "\n")


def main(folder: Path, answers: int = 6000, pairs: int = 3000, shapes: int = 1024) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    words = sorted({word(rng) for _ in range(3 * answers)})
    rng.shuffle(words)
    with (folder / "answers.jsonl").open("w") as file:
        for text in words[:answers]:
            file.write(json.dumps({"prompt": f"Reverse: {text}", "completion": text[::-1]}) + "\n")
    with (folder / "pairs.jsonl").open("w") as file:
        for text in words[:pairs]:
            row = {"prompt": f"Reverse: {text}", "chosen": text[::-1], "rejected": wrong(rng, text)}
            file.write(json.dumps(row) + "\n")
    write_shapes(folder, shapes)
    print(
        f"{folder}/answers.jsonl: {min(answers, len(words))} rows, "
        f"{folder}/pairs.jsonl: {min(pairs, len(words))} rows, "
        f"{folder}/shapes.jsonl: {shapes} rows with images"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
