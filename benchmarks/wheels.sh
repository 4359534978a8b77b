#!/usr/bin/env bash
# Collects into .whl/ what a machine without a network lacks to run this tree beside its own torch and transformers:
# wheels for Linux x86-64 and the Python of that machine (PYTHON_VERSION, 3.12), about 9 MB. `--all` adds what a machine
# with torch and transformers alone lacks, about 80 MB; `--peers` adds trl, for the comparison. See docs/offline.md.
set -euo pipefail
cd "$(dirname "$0")/.."
out=.whl version=${PYTHON_VERSION:-3.12} python=${PYTHON:-python3}
names=(pydantic pydantic-core annotated-types typing-inspection omegaconf datasets dill multiprocess xxhash liger-kernel bitsandbytes)
for word in "$@"; do
  case $word in
    --all) names+=(accelerate peft psutil pyarrow pandas python-dateutil six tzdata requests urllib3 charset-normalizer certifi) ;;
    --peers) names+=(trl==1.16.0) ;;
    *) echo "unknown word: $word (--all, --peers)" >&2; exit 2 ;;
  esac
done
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
rm -rf "$out"
mkdir "$out"
get() {
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" -d "$out" "$@"
}
# Versions of constraints.txt where it names them; pydantic itself names the pydantic-core that it works with.
for name in "${names[@]}"; do
  pinned=$(grep -iE "^${name//-/[-_]}==" constraints.txt | tr -d '\r' | tail -1 || true)
  get "${pinned:-$name}"
done
core=$(unzip -p "$out"/pydantic-[0-9]*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core==\([0-9.]*\).*/\1/p' | head -1)
if [ -n "$core" ] && ! ls "$out"/pydantic_core-"$core"-* >/dev/null 2>&1; then
  rm -f "$out"/pydantic_core-*
  get "pydantic-core==$core"
fi
# bitsandbytes ships a library for each CUDA version (CUDA, 130 for 13.0): this one's and the CPU's stay.
wheel=$PWD/$(ls "$out"/bitsandbytes-*.whl) work=$(mktemp -d)
(
  cd "$work"
  unzip -q "$wheel"
  find . -name 'libbitsandbytes_*.so' ! -name "*_cuda${CUDA:-130}.so" ! -name '*_cpu.so' -delete
  rm "$wheel"
  zip -qr "$wheel" .
)
rm -rf "$work"
du -sh "$out" | cut -f1
ls "$out"
