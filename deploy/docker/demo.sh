#!/bin/sh
# A coordinator and three sites in containers, in one command: images, certificates, keys, registration, a run, its results.
#   demo.sh [--set rounds=5 ...]    build and start what is missing, then `fedstill run run.toml` with these options
#   demo.sh down                    remove containers, networks and volumes: the keys and the runs are in them
# Takes docker compose or podman-compose, whichever finds its engine; COMPOSE="..." names another command.
set -eu
cd "$(dirname "$0")"
SITES="north east south"

if [ -z "${COMPOSE:-}" ]; then
    if docker info > /dev/null 2>&1 && docker compose version > /dev/null 2>&1; then
        COMPOSE="docker compose"
    elif podman info > /dev/null 2>&1 && podman-compose --version > /dev/null 2>&1; then
        COMPOSE="podman-compose"
    else
        echo "demo.sh: found neither docker compose with a running engine nor podman-compose with podman" >&2
        exit 1
    fi
fi

say() { echo "== $*"; }
compose() { $COMPOSE "$@"; }
healthy() { # SERVICE: wait at most three minutes until its health check passes
    for _ in $(seq 90); do
        compose exec -T "$1" python -m fedstill.deploy.healthy 127.0.0.1:9110 > /dev/null 2>&1 && return
        sleep 2
    done
    compose logs "$1" >&2
    echo "demo.sh: $1 is not healthy after three minutes; its log is above" >&2
    exit 1
}

if [ "${1:-}" = down ]; then
    compose down --volumes
    exit
fi

say "images, with ${COMPOSE%% --*}"
compose build coordinator # one after the other: the second shares all but its last layer with the first
compose build north
say "coordinator: certificate authority and SuperLink"
compose up -d --no-build coordinator
healthy coordinator
say "sites: a key each, registered with the coordinator"
for site in $SITES; do
    compose run --rm --no-deps -T "$site" sh /usr/local/bin/site key < /dev/null |
        compose exec -T coordinator fedstill keys register /dev/stdin "$site"
done
compose up -d --no-build $SITES
for site in $SITES; do healthy "$site"; done
say "run"
compose exec -T coordinator fedstill run /etc/fedstill/run.toml --on coordinator "$@"
compose exec -T coordinator sh -c 'cat /fedstill/runs/latest/report.html' > report.html
say "report: $PWD/report.html. Again: demo.sh; remove everything: demo.sh down"
