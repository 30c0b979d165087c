"""All benches of JAX: passes against torch, engines against vLLM, and a service against `skyrl`.

    python -m bench.jax [--skyrl DIR/bin/python]

The last part needs an environment with PyPI's `skyrl`; see `bench.jax_service`.
"""

import argparse
import subprocess
import sys

from bench.harness import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--skyrl", help="the python that has skyrl 0.3.0; none = leave that part out"
    )
    asked = parser.parse_args()
    parts = [["jax_passes"], ["jax_engine"]]
    if asked.skyrl:
        parts.append(["jax_service", "--skyrl", asked.skyrl])
    for name, *options in parts:
        print(f"\n## {name}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"bench.{name}", *options], cwd=ROOT, check=True)
    if not asked.skyrl:
        print("\njax_service was left out; give --skyrl PYTHON")


if __name__ == "__main__":
    main()
