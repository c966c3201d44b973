#!/bin/sh
# The NEON engine and the arm64 scalar one against the same plain loops and committed checksums, under emulation.
# Usage: neon.sh [scratch folder]. Ends with 77 (skip) where the cross compiler or the emulator is missing.
set -e
root=$(cd "$(dirname "$0")/.." && pwd)
cc=aarch64-linux-gnu-gcc
command -v $cc > /dev/null && command -v qemu-aarch64-static > /dev/null || exit 77
work=${1:-$(mktemp -d)}
mkdir -p "$work"
cd "$root"
$cc -std=gnu11 -O2 -static -Wall -Wextra -Wshadow -Wconversion -ffp-contract=off -fno-math-errno -fno-trapping-math \
    -D_GNU_SOURCE -Iinclude -Isrc -Itests/cross -Itests \
    tests/test_kern.c src/kern/kern.c src/kern/neon.c src/kern/scalar.c -o "$work/test_kern_arm64" -lm
exec qemu-aarch64-static "$work/test_kern_arm64"
