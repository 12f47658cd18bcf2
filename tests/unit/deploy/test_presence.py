"""One SuperNode a site, and a killed one is signed off: against a SuperLink's own Fleet service, in this process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.proto import fleet_pb2_grpc
from flwr.proto.fleet_pb2 import ActivateNodeResponse, DeactivateNodeResponse

from fedstill.common.config import SiteFile
from fedstill.deploy.coordinator.certificates import Certificates, make_certificates
from fedstill.deploy.coordinator.keys import new_key
from fedstill.deploy.site.presence import SiteBusy, only_client, sign_off

HOLD = "import sys, pathlib; from fedstill.deploy.site.presence import only_client\n"
HOLD += "with only_client(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


class Fleet(fleet_pb2_grpc.FleetServicer):
    """Flower's rules: only an absent node is taken in, only a present one is signed off, by its own number alone."""

    def __init__(self) -> None:
        self.number, self.present, self.lock = 17, False, threading.Lock()
        self.calls: list[str] = []

    def ActivateNode(self, request: Any, context: grpc.ServicerContext) -> ActivateNodeResponse:
        self.calls.append("activate")
        if self.present:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "Failed to activate SuperNode.")
        self.present = True
        return ActivateNodeResponse(node_id=self.number)

    def DeactivateNode(self, request: Any, context: grpc.ServicerContext) -> DeactivateNodeResponse:
        self.calls.append("deactivate")
        if request.node_id != self.number:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "Invalid node ID")
        if not self.present:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "Failed to deactivate SuperNode.")
        self.present = False
        return DeactivateNodeResponse()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Fleet, SiteFile]]:
    from concurrent.futures import ThreadPoolExecutor

    made: Certificates = make_certificates(tmp_path / "certificates")
    server, service = grpc.server(ThreadPoolExecutor(2)), Fleet()
    fleet_pb2_grpc.add_FleetServicer_to_server(service, server)
    pair = (made.key.read_bytes(), made.certificate.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    new_key(tmp_path / "site.key")
    site = {"name": "north", "model": "tiny-bert", "superlink": f"127.0.0.1:{port}"}
    site |= {"root_certificates": str(made.authority), "private_key": str(tmp_path / "site.key")}
    yield service, SiteFile.model_validate(site)
    server.stop(None).wait(10)


def test_a_killed_node_is_signed_off_so_that_its_successor_is_let_in(
    fleet: tuple[Fleet, SiteFile], tmp_path: Path
) -> None:
    service, site = fleet
    assert sign_off(site, tmp_path)  # the first start: the number is asked for
    assert service.calls == ["activate", "deactivate"]
    service.present = True  # a SuperNode came, and was killed
    assert sign_off(site, tmp_path)
    assert not service.present
    assert sign_off(site, tmp_path)  # one that Flower knows to be gone
    service.number = 18  # revoked and registered again
    assert sign_off(site, tmp_path)
    service.present = True
    assert sign_off(site, tmp_path)
    assert not service.present


def test_without_a_superlink_the_start_goes_on(fleet: tuple[Fleet, SiteFile], tmp_path: Path) -> None:
    gone = fleet[1].model_copy(update={"superlink": "127.0.0.1:1"})
    assert not sign_off(gone, tmp_path)
    assert not sign_off(SiteFile.model_validate({"name": "n", "model": "tiny-bert", "insecure": True}), tmp_path)


def test_a_second_client_of_a_site_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    with pytest.raises(SiteBusy, match="runs already; end it first"), only_client(tmp_path):
        pass
    first.kill()
    first.communicate()
    with only_client(tmp_path):
        pass


def test_a_supernode_that_lost_a_thread_ends_and_says_why() -> None:
    code = "import threading, time; from fedstill.deploy.site import supernode\n"
    code += "threading.excepthook = supernode.end_with_thread\n"
    code += "threading.Thread(target=lambda: 1 / 0).start(); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr
    assert "a thread of the SuperNode died (division by zero)" in done.stdout + done.stderr
