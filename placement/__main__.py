"""`python -m placement DEMANDS.yaml --nodes cluster.yaml`: print a plan for any demands.

It needs nothing else of this project. The file of demands:

device: GPU
groups:                        # demands of one group share slots
  - - {kind: policy, count: 8, share: 0.3}
    - {kind: engine, count: 8, share: 0.3, width: 2, block: 2}
  - - {kind: helper, count: 4, device: CPU}
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from placement.nodes import nodes_from_cluster_file
from placement.planner import plan
from placement.render import render
from placement.types import Demand, DoesNotFit


def main() -> None:
    """Print the plan for a file of demands, or exit with the reason why there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m placement",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("demands", type=Path, help="a file as above")
    parser.add_argument("--nodes", type=Path, required=True, help="a Ray cluster-launcher file")
    options = parser.parse_args()
    try:
        demands: Any = yaml.safe_load(options.demands.read_text())
        groups = [[Demand(**demand) for demand in group] for group in demands["groups"]]
        print(
            render(
                plan(groups, nodes_from_cluster_file(options.nodes), demands.get("device", "GPU"))
            )
        )
    except (DoesNotFit, OSError, yaml.YAMLError) as error:
        sys.exit(f"error: {error}")
    except (KeyError, TypeError) as error:
        sys.exit(f"error: {options.demands}: {error}; see --help for its form")


if __name__ == "__main__":
    main()
