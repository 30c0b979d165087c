"""Run the cases of `steps` on the second device: python -m tests.second_device FOLDER CASE ..."""

import sys

from tests.second_device import registered

registered()  # before anything asks torch for its accelerator

from tests.second_device.steps import main  # noqa: E402

main(sys.argv[1], sys.argv[2:])
