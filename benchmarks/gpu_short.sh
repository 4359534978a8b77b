#!/usr/bin/env bash
# The ladder of gpu.py on a card that is there for minutes: what shares a card runs side by side, what is timed runs
# alone after it. Results lie packed in OUT/ladder.tgz, again every few seconds: a command that is cut off leaves them.
#   benchmarks/gpu_short.sh OUT SECONDS GROUP... -- STAGE...
# A GROUP is names of stages joined by commas, or `tests` (tests marked gpu, on 6 workers); groups end after
# TOGETHER_S, half of the time by default. What they find is marked as of a shared card, and timed stages among them
# are left out: name those as STAGEs, which run alone. Traces are made later, elsewhere (gpu.py --traces only).
# GPU_WORDS=--stand-in rehearses it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd) seconds=$2 made=$(mktemp -d)
shift 2
end=$((SECONDS + seconds)) until=$((SECONDS + ${TOGETHER_S:-$((seconds / 2))})) python=${PYTHON:-python3}
pack() { tar -czf "$out/ladder.tmp" -C "$made" --exclude=models . && mv "$out/ladder.tmp" "$out/ladder.tgz"; }
ladder() { # NAME STAGE...; `shared` says whether others run beside it
  local name=$1 words=()
  shift
  read -ra words <<<"${GPU_WORDS:-} ${shared:+--shared}"
  "$python" benchmarks/gpu.py --out "$made/$name" --work "$made/models/$name" --limit-s $((until - SECONDS)) \
    --commit "${COMMIT:-}" --traces later --only "$@" "${words[@]}" 2>&1 | sed -u "s/^/[$name] /"
}
tests() {
  mkdir -p "$made/tests"
  PYTHONPATH="$PWD:$("$python" -c "import sys; sys.path[:0] = ['benchmarks']; from pathlib import Path
from first_light.wheels import site_of; print(site_of(Path.cwd()) or '')"):${PYTHONPATH:-}" \
    timeout $((until - SECONDS)) "$python" -m pytest tests/gpu -m gpu -n 6 -vv --tb=short -p no:cacheprovider -rfEs \
    --durations=15 -o timeout=120 >"$made/tests/log.txt" 2>&1
  grep -E "\] (FAILED|ERROR) " "$made/tests/log.txt" | sort -u | sed "s/^/[tests] /"
  tail -n 1 "$made/tests/log.txt" | sed "s/^/[tests] /"
}
ladder machine machine
pack
(while sleep 5; do pack; done) &
packer=$!
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  if [ "$1" = tests ]; then
    tests &
  else
    IFS=, read -ra names <<<"$1"
    shared=1 ladder "${names[0]//[\/ ]/-}" "${names[@]}" &
  fi
  shift
done
running=$(jobs -p | grep -vx "$packer" || true)
[ -z "$running" ] || wait $running
echo "side by side: done after $((SECONDS - end + seconds)) s"
shift || true
until=$end
[ $# -eq 0 ] || [ $((end - SECONDS)) -lt 20 ] || ladder alone "$@"
kill "$packer" 2>/dev/null
pack
echo "all: $((SECONDS - end + seconds)) s"
