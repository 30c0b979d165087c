"""The entry point of `serve deploy`: `import_path: skyrl_actors.api.ingress:build`."""

from typing import Any

from ray import serve

from skyrl_actors.commands.serve import deployed_application


def build(arguments: dict[str, Any]) -> serve.Application:
    """Build the application, and start the controller if there is none.

    `arguments` are {"config": path, "overrides": [...]}.
    """
    return deployed_application(arguments)
