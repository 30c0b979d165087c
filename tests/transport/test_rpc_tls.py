"""RPC between machines, encrypted with the certificates that Ray uses."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.remote import ActorDied
from skyrl_actors.transport.frames import HEAD
from skyrl_actors.transport.handshake import PROTOCOL_VERSION, RayTls
from skyrl_actors.transport.rpc import Address, RpcClient
from skyrl_actors.transport.rpc_server import RpcServer, to_one
from tests.transport.test_rpc_bounds import Target, until

ELSEWHERE = "127.0.0.2"  # an address that the server treats as another machine


class Authority:
    def __init__(self, folder: Path, name: str):
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.certificate = self._signed(self.name, self.key.public_key(), is_ca=True)
        self.file = folder / f"{name}.crt"
        self.file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, is_ca: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key)
        )
        made = made.serial_number(x509.random_serial_number()).not_valid_before(
            now - datetime.timedelta(days=1)
        )
        made = made.not_valid_after(now + datetime.timedelta(days=1))
        made = made.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return made.add_extension(names, critical=False).sign(self.key, hashes.SHA256())

    def member(self, name: str) -> RayTls:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate, key_file = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        certificate.write_bytes(
            self._signed(subject, key.public_key(), False).public_bytes(serialization.Encoding.PEM)
        )
        form = serialization.PrivateFormat.PKCS8
        key_file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        )
        return RayTls(certificate=str(certificate), key=str(key_file), ca=str(self.file))


def use(monkeypatch: pytest.MonkeyPatch, tls: RayTls) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", tls.certificate)
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", tls.key)
    monkeypatch.setenv("RAY_TLS_CA_CERT", tls.ca)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoopPolicy]:
    """Ray runs actors on uvloop when it is installed."""
    yield (
        uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()
    )


async def relay(address: Address, seen: bytearray) -> asyncio.Server:
    async def one_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while part := await reader.read(2**16):
                seen.extend(part)
                writer.write(part)
        except OSError:
            pass
        writer.close()

    async def both_ways(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(address.host, address.port)
        await asyncio.gather(one_way(reader, there[1]), one_way(there[0], writer))

    return await asyncio.start_server(both_ways, ELSEWHERE, 0)


def through(server: asyncio.Server, address: Address) -> RpcClient:
    async def find() -> Address:
        host, port = server.sockets[0].getsockname()
        return Address(host=host, port=port, token=address.token, tls=address.tls)

    return RpcClient(find, Target)


async def test_connections_between_machines_are_encrypted_if_ray_uses_tls(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    use(monkeypatch, authority.member("node"))
    server = RpcServer(to_one(Target()), Target)
    outside, inside = await server.address(ELSEWHERE), await server.address("127.0.0.1")
    assert outside.tls and not inside.tls
    seen = bytearray()
    listening = await relay(outside, seen)
    client = through(listening, outside)
    content = b"0123456789" * 300_000
    assert await client.call(Target.echo, content) == content
    assert len(await client.call(Target.large, 8)) == 8 * 2**20
    results = await asyncio.gather(*(client.call(Target.echo, number) for number in range(1000)))
    assert results == list(range(1000))
    assert len(seen) > 2 * len(content) and b"0123456789" not in seen and b"echo" not in seen
    await client.close()
    listening.close()
    await server.close()


async def test_a_lost_encrypted_connection_ends_its_calls(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    use(monkeypatch, authority.member("node"))
    target = Target()
    server = RpcServer(to_one(target), Target, abandoned=(Target.wait,))

    async def find() -> Address:
        return await server.address(ELSEWHERE)

    client = RpcClient(find, Target)
    waiting = asyncio.create_task(client.call(Target.wait))
    await until(lambda: target.running == 1)
    client.hang_up()
    with pytest.raises(ActorDied):
        await asyncio.wait_for(waiting, 10)
    await until(lambda: not server.callers and not server.calls)
    assert await client.call(Target.echo, 1) == 1
    await client.close()
    await server.close()


async def test_a_client_without_a_certificate_of_the_authority_is_refused(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use(monkeypatch, authority.member("node"))
    server = RpcServer(to_one(Target()), Target)
    address = await server.address(ELSEWHERE)

    async def find() -> Address:
        return address

    other = Authority(tmp_path, "other").member("stranger")
    use(monkeypatch, RayTls(certificate=other.certificate, key=other.key, ca=str(authority.file)))
    with pytest.raises(ActorDied):
        await RpcClient(find, Target).call(Target.echo, 1)
    monkeypatch.delenv("RAY_USE_TLS")
    with pytest.raises(InternalError, match="set RAY_USE_TLS for this process too"):
        await RpcClient(find, Target).call(Target.echo, 1)
    await server.close()


async def test_a_client_of_another_version_is_told_the_version_over_tls(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    tls = authority.member("node")
    use(monkeypatch, tls)
    server = RpcServer(to_one(Target()), Target)
    address = await server.address(ELSEWHERE)
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=tls.context("caller")
    )
    hello = (999).to_bytes(2) + bytes(32)
    writer.write(HEAD.pack(len(hello), 0) + hello)
    answer = await asyncio.wait_for(reader.readexactly(HEAD.size + 2), 10)
    assert int.from_bytes(answer[-2:]) == PROTOCOL_VERSION and not server.callers
    writer.close()
    await server.close()


async def test_a_man_in_the_middle_with_another_certificate_is_refused(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    """The man in the middle forwards challenges and proofs, which it cannot compute."""
    use(monkeypatch, authority.member("node"))
    server = RpcServer(to_one(Target()), Target)
    address = await server.address(ELSEWHERE)
    middle = authority.member("middle")

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = middle.context("caller")
        there = await asyncio.open_connection(address.host, address.port, ssl=context)

        async def one_way(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while part := await source.read(2**16):
                    target.write(part)
            except OSError:
                pass
            target.close()

        await asyncio.gather(one_way(reader, there[1]), one_way(there[0], writer))

    listening = await asyncio.start_server(pass_on, ELSEWHERE, 0, ssl=middle.context("server"))
    with pytest.raises(ActorDied, match="does not know its secret"):
        await through(listening, address).call(Target.echo, 1)
    listening.close()
    await server.close()


def test_an_incomplete_tls_configuration_is_refused():
    assert RayTls.configured({}) is None and RayTls.configured({"RAY_USE_TLS": "0"}) is None
    with pytest.raises(
        ConfigError, match="RAY_USE_TLS is set and RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT is not"
    ):
        RayTls.configured({"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": "node.crt"})


def test_contexts_require_a_certificate_of_the_authority(authority: Authority):
    tls = authority.member("node")
    for context in (tls.context("server"), tls.context("caller")):
        assert (
            context.verify_mode == ssl.CERT_REQUIRED
            and context.minimum_version >= ssl.TLSVersion.TLSv1_2
        )
