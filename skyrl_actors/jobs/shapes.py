"""A task with images: name the colour and the shape of a drawing.

It also makes demonstrations for a supervised warm-up. They teach colours and shapes apart, and the
form of a name, but not the right name.
"""

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

from skyrl_actors.jobs.environment import Environment, SingleTurn

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 40),
}
SHAPES = ("circle", "square", "triangle", "cross")
NAMES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
COLOUR, SHAPE, NAME = "Colour?", "Shape?", "Name?"
SIDE = 32  # pixels
KNOWN_SHARE = 0.4  # of the demonstrations about colours, and again about shapes


@dataclass(frozen=True, slots=True)
class ShapeTask:
    """A drawing, a question about it, and the right answer."""

    question: str
    answer: str
    image: bytes  # PNG

    def reward(self, text: str) -> float:
        return float(text.strip() == self.answer)

    def open(self) -> Environment:
        parts = [{"type": "image", "image": self.image}, {"type": "text", "text": self.question}]
        return SingleTurn(({"role": "user", "content": parts},), self.reward)


class ShapeTasks:
    """Drawings to name, for a job: `job.env.tasks: skyrl_actors.jobs.shapes:ShapeTasks`."""

    def __init__(self, seed: int, eval_prompts: int = 96):
        self.evaluation = list(shape_tasks(eval_prompts, f"evaluation {seed}"))
        self._seed = seed

    def batch(self, count: int, number: int) -> list[ShapeTask]:
        """Return the training batch with this number. It depends on the seed only."""
        return list(shape_tasks(count, f"training {self._seed} {number}"))


def drawing(rng: random.Random, colour: str, shape: str) -> bytes:
    """Return a PNG of a shape. Its place, size and shade vary, and so does the background."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.randint(0, 60) for _ in range(3)))
    pen, middle = ImageDraw.Draw(image), SIDE // 2
    r, x, y = rng.randint(11, 13), middle + rng.randint(-1, 1), middle + rng.randint(-1, 1)
    fill = tuple(max(0, min(255, value + rng.randint(-20, 20))) for value in COLOURS[colour])
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=fill)
    else:
        width = r // 3 + 1
        pen.rectangle((x - r, y - width, x + r, y + width), fill=fill)
        pen.rectangle((x - width, y - r, x + width, y + r), fill=fill)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def shape_tasks(count: int, seed: int | str) -> Iterator[ShapeTask]:
    """Yield drawings to name. Adjacent tasks have different names, all equally often."""
    rng = random.Random(f"shapes {seed}")
    for number in range(count):
        name = NAMES[number % len(NAMES)]
        yield ShapeTask(NAME, name, drawing(rng, *name.split()))


def shape_demonstrations(count: int, seed: int) -> Iterator[ShapeTask]:
    """Yield right answers about colours and shapes, and names at random."""
    rng = random.Random(f"shape demonstrations {seed}")
    for _ in range(count):
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        image, draw = drawing(rng, colour, shape), rng.random()
        if draw < KNOWN_SHARE:
            yield ShapeTask(COLOUR, colour, image)
        elif draw < 2 * KNOWN_SHARE:
            yield ShapeTask(SHAPE, shape, image)
        else:
            yield ShapeTask(NAME, rng.choice(NAMES), image)
