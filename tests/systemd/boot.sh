#!/bin/sh
# Boots this machine's own root as a container with systemd as PID 1. Runs in a mount namespace of its own; everything that the
# container writes goes to a tmpfs above the root, so nothing of this machine is changed and nothing is left behind.
#
#   boot.sh SPACE STUFF PYTHON PIP SITE NSPAWN
#     SPACE   empty folder for the mounts
#     STUFF   folder that the container finds as /opt/test; has the wheel
#     PYTHON  interpreter that /opt/honed is made with
#     PIP     interpreter that has pip
#     SITE    site-packages with everything that honed needs, vLLM included; the container has it as /opt/site
#     NSPAWN  systemd-nspawn
set -eu
space=$1 stuff=$2 python=$3 pip=$4 site=$5 nspawn=$6

mount -t tmpfs -o mode=0755 tmpfs "$space"
mkdir "$space/upper" "$space/work" "$space/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$space/upper,workdir=$space/work" "$space/root"
root=$space/root

rm -rf "$root"/etc/systemd/system/*.wants "$root/opt/test" "$root/opt/honed"
for unit in systemd-timesyncd systemd-logind systemd-udevd systemd-networkd systemd-resolved console-getty getty@tty1; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit.service"
done
mkdir -p "$root/opt"
cp -r "$stuff" "$root/opt/test"
chmod -R a+rX "$root/opt/test"

# What an operator does: an environment in /opt/honed. Its packages are this machine's; honed itself is the wheel.
chroot "$root" "$python" -m venv --without-pip /opt/honed
echo /opt/site > "$(echo "$root"/opt/honed/lib/python3*/site-packages)/others.pth"
chroot "$root" "$pip" -m pip --disable-pip-version-check --python /opt/honed/bin/python install \
    --quiet --no-deps --no-index "/$(cd "$root" && ls opt/test/honed-*.whl)"

exec "$nspawn" --directory="$root" --boot --register=no --keep-unit --private-network --link-journal=no --console=pipe \
    --bind-ro="$site:/opt/site" \
    systemd.unit=multi-user.target
