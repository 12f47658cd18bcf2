#!/bin/sh
# The coordinator's container: an authority at the first start, of which ca.crt alone is shared; then the SuperLink.
set -eu
if [ ! -f /fedstill/certificates/ca.crt ]; then
    fedstill certs new --folder /fedstill/certificates --host "${COORDINATOR:-coordinator}" --host localhost --host 127.0.0.1
fi
cp /fedstill/certificates/ca.crt /authority/ca.crt
exec fedstill superlink --certificates /fedstill/certificates --state /fedstill --health 0.0.0.0:9110
