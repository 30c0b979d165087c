"""Addresses that the endpoint cannot have are refused before anything starts."""

import socket

import pytest

from skyrl_actors.commands.one_service import check_port
from skyrl_actors.config.cluster import ClusterConfig, HttpConfig
from skyrl_actors.messages.errors import ConfigError


def at(host: str, port: int) -> ClusterConfig:
    return ClusterConfig(http=HttpConfig(host=host, port=port, open_to_network=True))


@pytest.mark.parametrize("host", ["::", "::1", "fe80::1"])
def test_an_address_of_ipv6_is_refused_by_name(host: str):
    with pytest.raises(ConfigError, match=f"http.host is {host}: .* IPv4 only; use 0.0.0.0"):
        check_port(at(host, 8000))


def test_a_taken_port_is_refused_and_a_free_one_passes():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            check_port(at("127.0.0.1", port))
    check_port(at("127.0.0.1", port))
