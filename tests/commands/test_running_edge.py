"""A Ray Serve that runs already, with settings that a service cannot change."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve import context
from ray.serve.config import HTTPOptions, ProxyLocation

from skyrl_actors.commands.one_service import refuse_other_edge
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import ConfigError

OPEN = {"host": "0.0.0.0", "open_to_network": True}


def running(monkeypatch: pytest.MonkeyPatch, location: object) -> None:
    def details() -> dict[str, Any]:
        return {"proxy_location": location, "applications": {}}

    client = SimpleNamespace(http_config=HTTPOptions(host="0.0.0.0"), get_serve_details=details)
    monkeypatch.setattr(context, "_get_global_client", lambda **_: client)


@pytest.mark.parametrize("location", ["HeadOnly", ProxyLocation.HeadOnly])
def test_an_endpoint_on_all_nodes_is_refused_where_serve_has_one_on_the_head(
    monkeypatch: pytest.MonkeyPatch, location: object
):
    running(monkeypatch, location)
    refuse_other_edge(ClusterConfig.model_validate({"http": OPEN}))
    with pytest.raises(ConfigError, match="proxy_location HeadOnly"):
        refuse_other_edge(ClusterConfig.model_validate({"http": {**OPEN, "nodes": "all"}}))


@pytest.mark.parametrize("location", ["EveryNode", ProxyLocation.EveryNode])
def test_one_on_all_nodes_serves_both(monkeypatch: pytest.MonkeyPatch, location: object):
    running(monkeypatch, location)
    for nodes in ("head", "all"):
        refuse_other_edge(ClusterConfig.model_validate({"http": {**OPEN, "nodes": nodes}}))
