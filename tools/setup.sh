# The packages this project is built and tested with, and how to get them. Sourced by ./demo and ./check.
# Debian's names; on another system install the same things by hand and the scripts go on.

build_packages="gcc libc6-dev cmake ninja-build pkg-config libcmocka-dev libjansson-dev libsimde-dev python3"
clang_packages="clang-14 libclang-rt-14-dev"
python_packages="python3-venv python3-dev g++" # torch.compile compiles C++
arm64_packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"

say()
{
    printf '\n== %s\n' "$*"
}

missing_packages()
{
    for package in "$@"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -q '^installed$' || printf '%s ' "$package"
    done
}

# Runs a command as root, or says what to type.
as_root()
{
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        printf 'This needs root, and there is no sudo. As root:  %s\n' "$*" >&2
        return 1
    fi
}

# install_packages NAME...: nothing when all are there already. 0 when they are there afterwards.
install_packages()
{
    if ! command -v apt-get >/dev/null; then
        printf 'No apt-get here: taking it that these are installed: %s\n' "$*" >&2
        return 0
    fi
    missing=$(missing_packages "$@")
    [ -n "$missing" ] || return 0
    say "installing: $missing"
    # One broken third-party source must not stop us: what counts is whether the packages install.
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update || true
    # shellcheck disable=SC2086 # a list of words
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $missing >/dev/null
}
