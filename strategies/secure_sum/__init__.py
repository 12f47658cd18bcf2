"""Secure sums: the coordinator learns the weighted sum of the sites' answers, and no part of it.

`site.py` makes keys, shares and masks; `server.py` adds up what is masked; `signed_keys.py` keeps others from posing
as a site.
"""

from fedstill.strategies.secure_sum.site import PROTOCOL, Masking, Peers, agreed, summed, under_masks

__all__ = ["PROTOCOL", "Masking", "Peers", "agreed", "summed", "under_masks"]
