"""Short scripts that show a failed check without this package."""

import re

from tinker_conformance.checks import Check
from tinker_conformance.scripts import SCRIPTS
from tinker_conformance.server import EPS, Server, rows

FIRST_LINES = """\
import tinker
from tinker import types
URL = {base_url!r}
client = tinker.ServiceClient(base_url=URL)  # the key: TINKER_API_KEY
client.get_server_capabilities()  # tinker 0.38 can block if two first calls meet
MODEL = {model!r}
row = {row}
def datum(row=row, **given):
    given = given or {{"weights": [1.0] * (len(row) - 1)}}
    inputs = {{"target_tokens": row[1:], **given}}
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)
"""
# Further lines, for scripts that use these names.
HELPERS = {
    "new": """\
def new(seed=1, rank=8):
    return client.create_lora_training_client(MODEL, rank=rank, seed=seed)
""",
    "train": """\
def train(model, *data):
    return model.forward_backward(list(data), "cross_entropy").result()
""",
    "RATE": "RATE = {rate:.4g}\n",
    "step": """\
def step(model, **adam):  # a plain step along the gradient, as eps is far above it
    adam = {{"learning_rate": RATE, "beta1": 0.0, "eps": 1e6, **adam}}
    model.optim_step(types.AdamParams(**adam)).result()
""",
    "score": """\
def score(model, row=row):
    found = model.forward([datum(row)], "cross_entropy").result().loss_fn_outputs
    return sum(found[0]["logprobs"].data)
""",
    "draw": """\
def draw(sampler, num_samples=1, **params):
    given = types.SamplingParams(**{{"max_tokens": 6, "seed": 1, **params}})
    prompt = types.ModelInput.from_ints(row)
    return sampler.sample(prompt, num_samples, given).result().sequences
""",
    "sampler": "sampler = model.save_weights_and_get_sampling_client()\n",
    "model": "model = client.create_lora_training_client(MODEL, rank=8, seed=1)\n",
    "PNG": """\
def PNG(shade, size=112):
    import struct, zlib
    part = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(
        ">I", zlib.crc32(name + data))
    lines = b"".join(b"\\0" + bytes([shade, y % 256, 40] * size) for y in range(size))
    head = part(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0))
    head += part(b"IDAT", zlib.compress(lines)) + part(b"IEND", b"")
    return b"\\x89PNG\\r\\n\\x1a\\n" + head
""",
    "post": """\
import httpx, os
def post(path, **body):
    headers = {{"X-API-Key": os.environ["TINKER_API_KEY"]}}
    while True:
        found = httpx.post(f"{{URL}}/api/v1/{{path}}", json=body, headers=headers, timeout=120)
        if found.status_code != 408 and found.json().get("type") != "try_again":
            return found.json()
""",
}
NEW_WITHOUT_SEEDS = """\
def new(seed=1, rank=8, starts={{}}):  # this server drops seeds: all but the first are loaded
    if (seed, rank) in starts:
        return client.create_training_client_from_state(starts[seed, rank])
    made = client.create_lora_training_client(MODEL, rank=rank, seed=seed)
    starts[seed, rank] = made.save_state(f"start-{{seed}}-{{rank}}").result().path
    return made
"""
NEEDS = {"step": ("RATE",), "sampler": ("model",)}
ORDER = ("PNG", "post", "new", "RATE", "model", "train", "step", "score", "sampler", "draw")
NO_ALPHA = 1e-3  # a step size where none was found


def script_of(check: Check, server: Server) -> str:
    """Return a script that anyone with the SDK can run: what is called, and what it prints."""
    script = SCRIPTS[check.name]
    used = {name for name in HELPERS if re.search(rf"\b{name}\b", script)}
    used -= {name for name in used if re.search(rf"^ *{name} = ", script, re.MULTILINE)}
    for name in tuple(used):
        used.update(NEEDS.get(name, ()))
    values = {
        "base_url": server.base_url,
        "model": server.base_model,
        "row": rows(0, 1)[0],
        "rate": (server.found_alpha or NO_ALPHA) * EPS,
    }
    helpers = HELPERS | ({"new": NEW_WITHOUT_SEEDS} if server.drops_seeds else {})
    text = FIRST_LINES + "".join(helpers[name] for name in ORDER if name in used)
    return text.format(**values) + script + "\n"
