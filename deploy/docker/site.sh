#!/bin/sh
# A site's container: a key of its own at the first start, then the checks and the SuperNode. `site key` makes the key,
# prints its public half for the coordinator, and starts nothing.
# Until the coordinator has registered the key the checks fail, and the container is started again.
set -eu
[ -f /fedstill/site.key ] || fedstill keys new /fedstill/site.key >&2
[ "${1:-}" != key ] || exec cat /fedstill/site.key.pub
exec flower-client --site "${SITE_FILE:-/etc/fedstill/site.toml}"
