#!/bin/sh
# Makes what compose.yaml expects in deploy/secrets: passwords of the metrics and of Grafana's admin. Existing ones are kept.
# CONTAINERS names the program that runs containers; the image "honed" has to be built.
set -eu
cd "$(dirname "$0")"
mkdir -p secrets
chmod 0700 secrets # the files in it are open to the containers' users, who see them through mounts
for name in prometheus grafana; do
    [ -s "secrets/$name-password" ] || head -c 24 /dev/urandom | base64 | tr -d '\n' > "secrets/$name-password"
done
containers=${CONTAINERS:-docker} image=${HONED_IMAGE:-honed:0.1.0}
if ! "$containers" image inspect "$image" > /dev/null 2>&1; then
    echo "deploy/secrets.sh: $containers has no image $image, which hashes the password: build it first (docs/install.md)" >&2
    exit 1
fi
hash='import bcrypt, sys; print(bcrypt.hashpw(sys.stdin.buffer.read(), bcrypt.gensalt(10)).decode())'
hashed=$("$containers" run --rm --interactive --network none --entrypoint python "$image" -c "$hash" < secrets/prometheus-password)
printf 'basic_auth_users:\n  prometheus: "%s"\n' "$hashed" > secrets/web.yml
chmod 0644 secrets/*
echo "deploy/secrets: web.yml, prometheus-password (user prometheus), grafana-password (user admin)"
