"""`python -m fedstill.deploy.healthy HOST:PORT`: exit code 0 if the SuperLink or SuperNode there serves."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub


def healthy(address: str, seconds: float = 3.0) -> bool:
    """Return whether the health service at an address answers SERVING."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError:
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if healthy(sys.argv[1]) else 1)
