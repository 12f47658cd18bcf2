"""FedDRS: the method, and the pseudo texts it makes in embedding space."""

from fedstill.strategies.feddrs.method import FedDRS, FedDRSParams

__all__ = ["FedDRS", "FedDRSParams"]
