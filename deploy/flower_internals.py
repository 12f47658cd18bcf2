"""The only file that uses Flower's private API: what a site's checks and sign-off need and no public API offers.

When the pin on flwr moves, this is the file to look at.
"""

from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
)
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode.cli import flower_supernode, flwr_clientapp
from flwr.supernode.runtime import run_clientapp

__all__ = [
    "HEARTBEAT_DEFAULT_INTERVAL",
    "PUBLIC_KEY_HEADER",
    "SIGNATURE_HEADER",
    "SYSTEM_TIME_TOLERANCE",
    "TIMESTAMP_HEADER",
    "ActivateNodeRequest",
    "DeactivateNodeRequest",
    "FleetStub",
    "flower_supernode",
    "flwr_clientapp",
    "now",
    "public_key_to_bytes",
    "run_clientapp",
    "sign_message",
]
